// What each preset of @kv/skeleton-prefill loses at which share of all blocks, as an SVG string, from the rows of skeleton.mjs.
import { fileURLToPath } from 'node:url';
import { line, text } from './svg.mjs';

export const DENSITY_CHART = fileURLToPath(new URL('../../docs/pictures/quality-against-density.svg', import.meta.url));

const of = 'of 4 other texts of 8192 tokens';
/** The best at an eighth first. */
const presets = { clustered: '#2f7d5b', antidiagonal: '#4477aa', 'vertical-slash': '#aa7744', pooled: '#ab4a8f', skeleton: '#b3262e', streaming: '#777777' };
const [width, height] = [640, 330];
const plot = { left: 56, right: 470, top: 34, bottom: 282 };
const [leastShare, mostLost] = [1 / 10, 25];
const shares = [1, 1 / 2, 1 / 4, 1 / 8];

const xOf = (share) => plot.right + ((plot.left - plot.right) * Math.log(share)) / Math.log(leastShare);
const yOf = (lost) => plot.bottom + ((plot.top - plot.bottom) * lost) / mostLost;

/** `[share, what of the perplexity is beyond dense attention's, in %]`, the largest share first. */
function pointsOf(preset, rows) {
  const found = (start) => rows.filter(({ measure }) => measure.startsWith(`${start} ${of}, ${preset} at `)).map(({ result }) => result.median);
  const dense = rows.find(({ measure }) => measure === `perplexity ${of}, dense`).result.median;
  const lost = found('perplexity').map((perplexity) => 100 * (perplexity / dense - 1));
  const points = found('scores computed').map((percent, index) => [percent / 100, lost[index]]);
  return [[1, 0], ...points].sort(([one], [other]) => other - one);
}

/** `files` are those of docs/benchmarks. */
export function densityChart(files) {
  const { rows } = files.find(({ name }) => name === 'skeleton-cpu');
  const grid = [
    ...shares.flatMap((share) => [
      line(xOf(share), plot.top, xOf(share), plot.bottom),
      text(xOf(share), plot.bottom + 18, share === 1 ? 'all' : `1/${1 / share}`),
    ]),
    ...[0, 5, 10, 15, 20, 25].flatMap((lost) => [
      line(plot.left, yOf(lost), plot.right, yOf(lost)),
      text(plot.left - 6, yOf(lost) + 4, lost === 0 ? '0 %' : `+${lost} %`, 'end'),
    ]),
  ];
  const drawn = Object.entries(presets).flatMap(([preset, colour], index) => {
    const points = pointsOf(preset, rows).map(([share, lost]) => [xOf(share).toFixed(1), yOf(lost).toFixed(1)]);
    const y = plot.top + 14 + 22 * index;
    return [
      `<polyline points="${points.join(' ')}" fill="none" stroke="${colour}" stroke-width="2" clip-path="url(#plot)"/>`,
      ...points.map(([x, at]) => `<circle cx="${x}" cy="${at}" r="3.5" fill="${colour}" clip-path="url(#plot)"/>`),
      `<line x1="${plot.right + 20}" y1="${y}" x2="${plot.right + 44}" y2="${y}" stroke="${colour}" stroke-width="2"/>`,
      text(plot.right + 50, y + 4, preset, 'start'),
    ];
  });
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" font-family="sans-serif" font-size="12" fill="#222">`,
    `<rect width="${width}" height="${height}" fill="#fff"/>`,
    `<clipPath id="plot"><rect x="${plot.left}" y="${plot.top - 4}" width="${plot.right - plot.left + 4}" height="${plot.bottom - plot.top + 8}"/></clipPath>`,
    ...grid,
    ...drawn,
    text(plot.left, plot.top - 14, 'perplexity beyond dense attention', 'start'),
    text((plot.left + plot.right) / 2, plot.bottom + 38, 'share of the blocks that is computed'),
    '</svg>',
    '',
  ].join('\n');
}
