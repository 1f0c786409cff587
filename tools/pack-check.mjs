// Packs every public package and uses it as a stranger would: what its README says to install, in an empty folder,
// install scripts blocked, empty HOME, and a strict layout in which code finds only what its own manifest names.
// Needs built packages.
import { execFile } from 'node:child_process';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { availableParallelism, tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { checkPackage, createPackageFromTarballData } from '@arethetypeswrong/core';

const root = fileURLToPath(new URL('..', import.meta.url));
const scratch = mkdtempSync(join(tmpdir(), 'kv-pack-'));
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

/** The packages that the README says to install. */
function installed(readme) {
  const names = /^npm install (.+)$/m.exec(readme)?.[1]?.split(' ');
  if (names === undefined) throw new Error('README.md has no line "npm install …"');
  return names;
}

async function checkContents({ manifest, tarball, files }) {
  for (const script of installScripts) {
    if (manifest.scripts?.[script]) throw new Error(`has an install script: ${script}`);
  }
  if (!manifest.keywords?.length) throw new Error('package.json has no keywords');
  for (const wanted of ['README.md', 'LICENSE']) {
    if (!files.includes(wanted)) throw new Error(`the tarball lacks ${wanted}`);
  }
  await run(process.execPath, [tool('publint'), '--strict', tarball]);
  const { problems = [] } = await checkPackage(createPackageFromTarballData(new Uint8Array(readFileSync(tarball))));
  // Nobody resolves as Node 10 did.
  const met = problems.filter(({ resolutionKind }) => resolutionKind !== 'node10');
  if (met.length > 0) throw new Error(`its types are wrong: ${JSON.stringify(met)}`);
}

async function checkInstalled(one, packed) {
  const { manifest, path } = one;
  const folder = join(scratch, manifest.name.replace('@kv/', 'install-'));
  const home = join(folder, 'home');
  mkdirSync(home, { recursive: true });
  const readme = readFileSync(join(path, 'README.md'), 'utf8');
  const direct = installed(readme);
  const fileOf = Object.fromEntries(packed.map((each) => [each.manifest.name, `file:${each.tarball}`]));
  const dependencies = Object.fromEntries(direct.map((name) => [name, fileOf[name]]));
  const overrides = { ...fileOf, ...Object.fromEntries(direct.map((name) => [name, `$${name}`])) };
  writeFileSync(join(folder, 'package.json'), JSON.stringify({ private: true, dependencies, overrides }));
  // Nothing of ours may come from a registry.
  writeFileSync(join(folder, '.npmrc'), '@kv:registry=http://127.0.0.1:9/\nfetch-retries=0\n');
  const env = { ...process.env, HOME: home };
  const options = ['--install-strategy=linked', '--ignore-scripts', '--no-audit', '--no-fund', '--no-update-notifier'];
  await run('npm', ['install', ...options], { cwd: folder, env });

  const node = (code) => run(process.execPath, ['-e', code], { cwd: folder, env });
  if (manifest.os) {
    const name = await node(`process.stdout.write(require('@kv/sparse-core').nativeBinary().packageName)`);
    if (name !== manifest.name) throw new Error(`@kv/sparse-core takes ${name} where ${manifest.name} is installed`);
    return;
  }
  await node(`
    const keys = (module) => Object.keys(module).filter((key) => !/^(default|module.exports)$/.test(key)).sort().join();
    const required = keys(require('${manifest.name}'));
    import('${manifest.name}').then((imported) => {
      if (keys(imported) !== required) throw new Error('import and require give different names');
    });`);

  const shown = example(readme);
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

const pack = (path) => run('npm', ['pack', '--json', '--pack-destination', scratch], { cwd: path });

/** A platform package whose binary this machine has not built. */
function lacksBinary({ path, manifest }) {
  return manifest.os !== undefined && !existsSync(join(path, manifest.main));
}

/** An empty platform package would hide from its users what they lack. */
async function checkRefusal({ path, manifest }) {
  const refusal = await pack(path).then(
    () => 'it was packed',
    (error) => error.message,
  );
  if (!refusal.includes(`${manifest.name} has no ${manifest.main}`)) {
    throw new Error(`packing it without its binary must be refused, which it is not: ${refusal}`);
  }
}

const packages = publicPackages();
const unbuilt = packages.filter(lacksBinary);
const packed = await forEach(
  packages.filter((each) => !unbuilt.includes(each)),
  async ({ path, manifest }) => {
    const [{ filename, files }] = JSON.parse(await pack(path));
    return { path, manifest, tarball: join(scratch, filename), files: files.map((file) => file.path) };
  },
);

const counts = { passed: 0, failed: 0, skipped: 0 };
await forEach([...packed, ...unbuilt], async (each) => {
  const { name } = each.manifest;
  try {
    if (unbuilt.includes(each)) {
      await checkRefusal(each);
      counts.skipped += 1;
      console.log(`pack-check: skipped ${name}, its binary is not built here`);
      return;
    }
    await checkContents(each);
    await checkInstalled(each, packed);
    counts.passed += 1;
    console.log(`pack-check: ok   ${name}`);
  } catch (error) {
    counts.failed += 1;
    console.error(`pack-check: FAIL ${name}: ${error.message}`);
  }
});
rmSync(scratch, { recursive: true });
console.log(`pack-check: ${counts.passed} passed, ${counts.failed} failed, ${counts.skipped} skipped`);
process.exitCode = counts.failed === 0 ? 0 : 1;
