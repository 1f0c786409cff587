// What a stranger waits for: `npm install` into an empty folder with an empty cache, and then the first token of a new
// process, against node-llama-cpp. Needs built packages and npm's registry; our own packages, which no registry has
// yet, come packed from a folder.
//
//   node tools/bench/install.mjs [--rounds 3]
import { execFile, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs, promisify } from 'node:util';
import { ggufOf } from './cache.mjs';
import { installLlamaCpp, NAME, VERSION } from './peers/llama-cpp.mjs';
import { keepRows, stamp, summarise } from './results.mjs';

const { values } = parseArgs({ options: { rounds: { type: 'string', default: '3' } } });
const rounds = Number(values.rounds);
const root = fileURLToPath(new URL('../..', import.meta.url));
const scratch = mkdtempSync(join(tmpdir(), 'kv-install-'));
const execute = promisify(execFile);
const seconds = (started) => (performance.now() - started) / 1000;

/** A manifest that takes @kv/model and what it needs of ours from tarballs. */
async function ourManifest() {
  const names = ['sparse-core', 'sparse-core-linux-x64', 'model'];
  const tarballs = names.map(async (name) => {
    const { stdout } = await execute('npm', ['pack', '--json', '--pack-destination', scratch], { cwd: join(root, 'packages', name) });
    return [`@kv/${name}`, `file:${join(scratch, JSON.parse(stdout)[0].filename)}`];
  });
  const { '@kv/model': model, ...overrides } = Object.fromEntries(await Promise.all(tarballs));
  return { private: true, dependencies: { '@kv/model': model }, overrides };
}

/** Installs what a manifest names: how long it takes, how many packages there are then, how large they are on disk. */
async function install(manifest) {
  const folder = mkdtempSync(join(scratch, 'install-'));
  mkdirSync(join(folder, 'cache'));
  writeFileSync(join(folder, 'package.json'), JSON.stringify(manifest));
  const started = performance.now();
  await execute('npm', ['install', '--cache', join(folder, 'cache'), '--no-audit', '--no-fund', '--no-update-notifier'], { cwd: folder });
  const taken = seconds(started);
  const { packages } = JSON.parse(readFileSync(join(folder, 'node_modules/.package-lock.json'), 'utf8'));
  const { stdout } = await execute('du', ['--summarize', '--block-size=1', 'node_modules'], { cwd: folder });
  rmSync(folder, { recursive: true });
  return { seconds: taken, packages: Object.keys(packages).length, mebibytes: parseInt(stdout) / 2 ** 20 };
}

const directory = join(root, 'models/needle-8m');
const model = { directory, gguf: ggufOf(directory, 'needle-8m') };

/** From the start of a process to its first token. */
async function firstToken(engine) {
  const started = performance.now();
  const child = spawn(process.execPath, [fileURLToPath(new URL('first-token.mjs', import.meta.url)), engine, JSON.stringify(model)], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const ended = once(child, 'close');
  const [token] = await once(child.stdout, 'data');
  const taken = seconds(started);
  await ended;
  return { seconds: taken, token: Number(token) };
}

/** Samples of ours and theirs, in turns. */
async function alternate(count, ours, theirs) {
  const samples = { ours: [], theirs: [] };
  for (let round = 0; round < count; round++) {
    samples.ours.push(await ours());
    samples.theirs.push(await theirs());
  }
  return samples;
}

const manifest = await ourManifest();
const peer = { private: true, dependencies: { [NAME]: VERSION } };
const installs = await alternate(rounds, () => install(manifest), () => install(peer));
installLlamaCpp();
const starts = await alternate(3 * rounds, () => firstToken('./ours.mjs'), () => firstToken('./peers/llama-cpp.mjs'));
rmSync(scratch, { recursive: true });
const tokens = new Set([...starts.ours, ...starts.theirs].map(({ token }) => token));
if (tokens.size !== 1) throw new Error(`The engines give different first tokens: ${[...tokens].join(', ')}`);

const row = (measure, shapes, unit, { ours, theirs }, figure) => ({
  measure,
  shapes,
  device: 'cpu',
  kind: 'measured',
  unit,
  better: 'lower',
  result: summarise(ours.map(figure)),
  reference: { name: `${NAME} ${VERSION}`, ...summarise(theirs.map(figure)) },
  chart: false,
  ...stamp(),
});
const what = '@kv/model, CPU only; an empty folder and an empty cache; our own packages from a folder';
keepRows('install', 'To install and to start', [
  row('npm install, packages', what, 'packages', installs, ({ packages }) => packages),
  row('npm install, space on disk', what, 'MiB', installs, ({ mebibytes }) => Number(mebibytes.toFixed(1))),
  row('npm install, time', what, 's', installs, (each) => Number(each.seconds.toFixed(2))),
  row('a new process to its first token, needle-8m, 2 threads', '16 tokens of prompt, greedy', 's', starts, (each) => Number(each.seconds.toFixed(3))),
]);
