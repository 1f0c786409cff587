// Type-checks and runs every block of code of every page, or of the pages that are given, against the built packages
// and with the models beside it. In front of a block may stand, as comments of the page:
//   <!-- setup          code that the block continues
//   <!-- not run: WHY   for what needs a GPU or a network; it must still parse, and fit its types
import { execFile, execFileSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { delimiter, join, relative, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { transformSync } from 'esbuild';
import ts from 'typescript';
import { fetchNode } from './fetch-node.mjs';

const root = fileURLToPath(new URL('..', import.meta.url));
mkdirSync(join(root, 'build'), { recursive: true });
// In the repository, so that blocks find its packages.
const scratch = mkdtempSync(join(root, 'build/pages-'));
// The oldest Node that the packages support runs the blocks.
const node = process.versions.node.startsWith('20.') ? process.execPath : join(fetchNode('20.19.6'), 'node');
const timeout = 120_000;

const execute = promisify(execFile);

function pages() {
  const given = process.argv.slice(2);
  if (given.length > 0) return given.map((page) => resolve(page));
  const listed = execFileSync('git', ['ls-files', '--cached', '--others', '--exclude-standard', '*.md'], { cwd: root });
  const names = String(listed).trim().split('\n');
  return names.filter((name) => !name.startsWith('.changeset/')).map((name) => join(root, name));
}

/** A page's blocks: where each begins, what it says in which language, and what the page says of it. */
function blocksOf(page) {
  const lines = readFileSync(page, 'utf8').split('\n');
  const blocks = [];
  let comment = [];
  for (let at = 0; at < lines.length; at += 1) {
    const collect = (end) => {
      const last = lines.findIndex((line, index) => index >= at && end.test(line));
      if (last < 0) throw new Error(`${page}:${at + 1}: what begins here has no end`);
      const taken = lines.slice(at, last + 1);
      at = last;
      return taken;
    };
    const [, indent, language] = /^( *)```(\S*)/.exec(lines[at]) ?? [];
    if (/^<!-- (setup$|not run: )/.test(lines[at])) {
      comment.push(collect(/-->$/));
    } else if (language !== undefined) {
      const line = at + 2;
      at += 1;
      const code = collect(new RegExp(`^${indent}\`\`\`$`)).slice(0, -1);
      if (language !== '') blocks.push(described(page, line, language, code.join('\n'), comment));
      comment = [];
    } else if (lines[at] !== '') {
      comment = [];
    }
  }
  return blocks;
}

function described(page, line, language, code, comments) {
  const setup = comments.filter(([first]) => first === '<!-- setup').flatMap((lines) => lines.slice(1, -1));
  const skipped = comments.some(([first]) => first.startsWith('<!-- not run: '));
  // pack-check installs every package as its README says.
  const installs = code.split('\n').every((each) => each.startsWith('npm install @kv/'));
  return { place: `${relative(root, page)}:${line}`, line, language, code, setup, runs: !skipped && !installs };
}

const extensions = { js: '.mjs', ts: '.mts', sh: '.sh' };

/** Writes a block behind its set-up, in a folder of its own. */
function write(block, index) {
  if (!Object.hasOwn(extensions, block.language)) {
    throw new Error(`the language '${block.language}' is not checked; use js, ts or sh, or none for an output`);
  }
  const folder = join(scratch, String(index));
  mkdirSync(folder);
  symlinkSync(join(root, 'models'), join(folder, 'models'));
  const file = join(folder, `block${extensions[block.language]}`);
  // A script without imports is no module, and could not await.
  const end = block.language === 'sh' ? '' : '\nexport {};\n';
  writeFileSync(file, [...block.setup, block.code, end].join('\n'));
  return { ...block, folder, file };
}

/** What TypeScript says against blocks, in lines of their pages. Plain JavaScript need not name its types. */
function typeErrors(blocks) {
  const options = {
    target: ts.ScriptTarget.ES2022,
    lib: ['lib.es2023.d.ts', 'lib.esnext.disposable.d.ts'],
    module: ts.ModuleKind.NodeNext,
    strict: true,
    noEmit: true,
    skipLibCheck: true,
    types: ['node'],
    typeRoots: [join(root, 'node_modules/@types')],
  };
  const check = (language, more) => {
    const files = blocks.filter((block) => block.language === language).map(({ file }) => file);
    return files.length === 0 ? [] : ts.getPreEmitDiagnostics(ts.createProgram(files, { ...options, ...more }));
  };
  const found = [...check('js', { allowJs: true, checkJs: true, noImplicitAny: false }), ...check('ts', {})];
  return found.map(({ file, start, messageText }) => {
    const message = ts.flattenDiagnosticMessageText(messageText, '\n');
    const block = blocks.find((each) => file && resolve(file.fileName) === each.file);
    if (block === undefined) return { block: blocks[0], message };
    const line = file.getLineAndCharacterOfPosition(start).line - block.setup.length;
    return { block, message: `${line < 0 ? 'set-up' : `line ${block.line + line}`}: ${message}` };
  });
}

async function run({ language, file, folder, runs }) {
  const env = {
    ...process.env,
    // An npx that does not find a command must not ask a registry for it.
    npm_config_offline: 'true',
    PATH: [join(root, 'node_modules/.bin'), process.env.PATH].join(delimiter),
  };
  const options = { cwd: folder, env, timeout, maxBuffer: 1 << 26 };
  if (language === 'sh') {
    await execute('bash', runs ? ['-euo', 'pipefail', file] : ['-n', file], options);
    return;
  }
  if (!runs) return;
  let script = file;
  if (language === 'ts') {
    script = join(folder, 'block.mjs');
    writeFileSync(script, transformSync(readFileSync(file, 'utf8'), { loader: 'ts', target: 'node20' }).code);
  }
  await execute(node, [script], options);
}

const failures = new Map();
const fail = ({ place }, message) => failures.set(place, [...(failures.get(place) ?? []), message]);
const counts = { run: 0, parsed: 0 };
try {
  const written = pages().flatMap(blocksOf).flatMap((block, index) => {
    try {
      return [write(block, index)];
    } catch ({ message }) {
      fail(block, message);
      return [];
    }
  });
  for (const { block, message } of typeErrors(written)) fail(block, message);
  const queue = written.values();
  const work = async () => {
    for (const block of queue) {
      counts[block.runs ? 'run' : 'parsed'] += 1;
      await run(block).catch(({ message, stderr = '' }) => fail(block, message.includes(stderr) ? message : `${message}\n${stderr}`));
    }
  };
  await Promise.all(Array.from({ length: availableParallelism() }, work));
} finally {
  rmSync(scratch, { recursive: true });
}
for (const [place, messages] of failures) console.error(`check-pages: ${place}: ${messages.join('\n')}`);
console.log(`check-pages: ${counts.run} blocks run, ${counts.parsed} parsed, ${failures.size} failed`);
process.exitCode = failures.size === 0 ? 0 : 1;
