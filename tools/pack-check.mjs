// Packs every public package and uses it as a stranger would: alone in an empty folder, install scripts
// blocked, empty HOME, no other @kv package than the packed ones it depends on. Needs built packages.
import { execFile } from 'node:child_process';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { availableParallelism, tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

const root = fileURLToPath(new URL('..', import.meta.url));
const scratch = mkdtempSync(join(tmpdir(), 'kv-pack-'));
// Every user downloads the first; the second only who asks for CUDA.
const largestBinary = 5_000_000;
const largestCudaBinary = 60_000_000;
const installScripts = ['preinstall', 'install', 'postinstall', 'prepare'];

const execute = promisify(execFile);

async function run(command, args, options = {}) {
  try {
    const { stdout } = await execute(command, args, { maxBuffer: 1 << 28, ...options });
    return stdout;
  } catch (error) {
    const { stdout = '', stderr = error.message } = error;
    throw new Error(`${command} ${args.join(' ')}\n${stdout}${stderr}`, { cause: error });
  }
}

/** What `work` gives for each item, of which as many as there are cores are in work at a time. */
async function forEach(items, work) {
  const results = [];
  const queue = items.entries();
  const worker = async () => {
    for (const [index, item] of queue) results[index] = await work(item);
  };
  await Promise.all(Array.from({ length: availableParallelism() }, worker));
  return results;
}

const tool = (name) => join(root, 'node_modules/.bin', name);

function publicPackages() {
  return readdirSync(join(root, 'packages'))
    .map((folder) => join(root, 'packages', folder))
    .filter((path) => existsSync(join(path, 'package.json')))
    .map((path) => ({ path, manifest: JSON.parse(readFileSync(join(path, 'package.json'), 'utf8')) }))
    .filter(({ manifest }) => !manifest.private);
}

/** The block of code under the README's "## Example": what it says, in which language. */
function example(readme) {
  const block = /^## Example\n[^]*?^```(js|sh)\n([^]*?)^```/m.exec(readme);
  return block && { language: block[1], code: block[2] };
}

async function checkContents({ path, manifest, tarball, files }) {
  for (const script of installScripts) {
    if (manifest.scripts?.[script]) throw new Error(`has an install script: ${script}`);
  }
  for (const wanted of ['README.md', 'LICENSE']) {
    if (!files.includes(wanted)) throw new Error(`the tarball lacks ${wanted}`);
  }
  for (const file of files.filter((name) => name.endsWith('.node'))) {
    const { size } = statSync(join(path, file));
    const largest = manifest.name.endsWith('-cuda') ? largestCudaBinary : largestBinary;
    if (size >= largest) throw new Error(`${file} has ${size} bytes; fewer than ${largest} are wanted`);
  }
  await run(process.execPath, [tool('publint'), '--strict', tarball]);
  // Nobody resolves as Node 10 did, and './testing' is for this workspace only.
  const types = [tool('attw'), '--profile', 'node16', '--exclude-entrypoints', 'testing', '--', tarball];
  if (manifest.types) await run(process.execPath, types);
}

/** `manifest`'s package and every packed one that it depends on. */
function closure(manifest, packed, found = new Set()) {
  found.add(manifest.name);
  for (const name of Object.keys({ ...manifest.dependencies, ...manifest.optionalDependencies })) {
    const dependency = packed.find((each) => each.manifest.name === name);
    if (dependency && !found.has(name)) closure(dependency.manifest, packed, found);
  }
  return found;
}

async function checkInstalled(one, packed) {
  const { manifest, path } = one;
  const folder = join(scratch, manifest.name.replace('@kv/', 'install-'));
  const home = join(folder, 'home');
  mkdirSync(home, { recursive: true });
  const names = [...closure(manifest, packed)];
  const dependencies = Object.fromEntries(
    names.map((name) => [name, `file:${packed.find((each) => each.manifest.name === name).tarball}`]),
  );
  const overrides = Object.fromEntries(names.map((name) => [name, `$${name}`]));
  writeFileSync(join(folder, 'package.json'), JSON.stringify({ private: true, dependencies, overrides }));
  // Nothing of ours may come from a registry.
  writeFileSync(join(folder, '.npmrc'), '@kv:registry=http://127.0.0.1:9/\n');
  const env = { ...process.env, HOME: home };
  await run('npm', ['install', '--ignore-scripts', '--no-audit', '--no-fund', '--no-update-notifier'], { cwd: folder, env });

  const node = (code) => run(process.execPath, ['-e', code], { cwd: folder, env });
  if (manifest.os) {
    await node(`require('${manifest.name}')`);
    return;
  }
  await node(`
    const keys = (module) => Object.keys(module).filter((key) => !/^(default|module.exports)$/.test(key)).sort().join();
    const required = keys(require('${manifest.name}'));
    import('${manifest.name}').then((imported) => {
      if (keys(imported) !== required) throw new Error('import and require give different names');
    });`);

  const shown = example(readFileSync(join(path, 'README.md'), 'utf8'));
  if (!shown) throw new Error('README.md has no js or sh block under "## Example"');
  if (existsSync(join(root, 'models'))) symlinkSync(join(root, 'models'), join(folder, 'models'));
  const file = join(folder, shown.language === 'js' ? 'example.mjs' : 'example.sh');
  writeFileSync(file, shown.code);
  const output =
    shown.language === 'js'
      ? await run(process.execPath, [file], { cwd: folder, env })
      : await run('bash', ['-euo', 'pipefail', file], { cwd: folder, env });
  if (output.trim() === '') throw new Error('the README example printed nothing');
}

/** A platform package whose binary this machine has not built. */
function lacksBinary({ path, manifest }) {
  return manifest.os !== undefined && !existsSync(join(path, manifest.main));
}

const packages = publicPackages();
const skipped = packages.filter(lacksBinary);
for (const { manifest } of skipped) console.log(`pack-check: skipped ${manifest.name}, its binary is not built here`);
const packable = packages.filter((each) => !skipped.includes(each));
const packed = await forEach(packable, async ({ path, manifest }) => {
  const packing = await run('npm', ['pack', '--json', '--pack-destination', scratch], { cwd: path });
  const [{ filename, files }] = JSON.parse(packing);
  return { path, manifest, tarball: join(scratch, filename), files: files.map((file) => file.path) };
});

let failed = 0;
await forEach(packed, async (each) => {
  try {
    await checkContents(each);
    await checkInstalled(each, packed);
    console.log(`pack-check: ok   ${each.manifest.name}`);
  } catch (error) {
    failed += 1;
    console.error(`pack-check: FAIL ${each.manifest.name}: ${error.message}`);
  }
});
rmSync(scratch, { recursive: true });
console.log(`pack-check: ${packed.length - failed} passed, ${failed} failed, ${skipped.length} skipped`);
process.exitCode = failed === 0 ? 0 : 1;
