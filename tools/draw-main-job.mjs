// Draws docs/pictures/main-job.svg: what `npm start` writes on a terminal, its progress left out. Needs built packages.
//
//   node tools/draw-main-job.mjs
import { writeFileSync } from 'node:fs';
import { PassThrough } from 'node:stream';
import { fileURLToPath } from 'node:url';
import { stripVTControlCharacters } from 'node:util';
import { runMainJob } from './main-job.mjs';

const picture = fileURLToPath(new URL('../docs/pictures/main-job.svg', import.meta.url));
const mostColumns = 79;
const [columnWidth, lineHeight, margin] = [8, 19, 16];
const progress = /: [\d,]+\/[\d,]+ tokens \(\d+%\)/;

/** What a style of `util.styleText` begins and ends with, and the classes of the picture. */
const classes = { 0: 'ink', 1: 'bold', 2: 'dim', 22: 'ink', 31: 'red', 32: 'green', 39: 'ink' };

async function screen() {
  let written = '$ npm start\n';
  const collect = (stream) => stream.on('data', (chunk) => (written += chunk));
  const stdout = collect(Object.assign(new PassThrough(), { isTTY: true, hasColors: () => true }));
  const exitCode = await runMainJob([], { stdout, stderr: collect(new PassThrough()) });
  if (exitCode !== 0) throw new Error(`The main job ended with ${exitCode}:\n${written}`);
  return written.trimEnd().split('\n').filter((line) => !progress.test(line));
}

/** The pieces of a line: where each begins, how it is styled, what it says. */
function pieces(line) {
  let column = 0;
  // In front of every piece but the first stands its style, as `31m`.
  return `0m${line}`.split('\x1b[').flatMap((part) => {
    const [, code, words] = /^(\d+)m(.*)/.exec(part);
    const start = column;
    column += words.length;
    // Runs of spaces would collapse.
    return [...words.matchAll(/\S+( \S+)*/g)].map(({ 0: text, index }) => ({ column: start + index, style: classes[code], text }));
  });
}

const escaped = (text) => text.replace(/&/g, '&amp;').replace(/</g, '&lt;');

function drawPiece({ column, style, text }, line) {
  const [x, y] = [margin + column * columnWidth, margin + (line + 0.75) * lineHeight];
  // As wide as its columns, whatever the font.
  const width = `textLength="${text.length * columnWidth}" lengthAdjust="spacingAndGlyphs"`;
  return `  <text class="${style}" x="${x}" y="${y}" ${width}>${escaped(text)}</text>`;
}

function draw(lines) {
  const width = mostColumns * columnWidth + 2 * margin;
  const height = lines.length * lineHeight + 2 * margin;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img" aria-label="What npm start writes">
  <style>
    text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }
    .page { fill: #f6f8fa; } .ink, .bold { fill: #1f2328; } .dim { fill: #59636e; } .bold { font-weight: bold; }
    .green { fill: #1a7f37; } .red { fill: #d1242f; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #151b23; } .ink, .bold { fill: #f0f6fc; } .dim { fill: #9198a1; }
      .green { fill: #3fb950; } .red { fill: #f85149; }
    }
  </style>
  <rect class="page" width="${width}" height="${height}" rx="6"/>
${lines.flatMap((line, index) => pieces(line).map((piece) => drawPiece(piece, index))).join('\n')}
</svg>
`;
}

const lines = await screen();
for (const line of lines.map(stripVTControlCharacters)) {
  if (line.length > mostColumns) throw new Error(`A line of ${line.length} columns; at most ${mostColumns} are wanted:\n${line}`);
}
writeFileSync(picture, draw(lines));
