// Fails when a native binary asks for a newer glibc than the error of @kv/sparse-core and the README of its package say.
// `node tools/check-glibc.mjs [BINARY…]`; by default all that are built.
import { execFileSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { installedBinary } from './build-native.mjs';

const fromRoot = (path) => fileURLToPath(new URL(`../${path}`, import.meta.url));
const saidIn = [
  'packages/sparse-core/src/load-addon.ts',
  'packages/sparse-core-linux-x64/README.md',
  'packages/sparse-core-linux-x64-cuda/README.md',
];

function said() {
  const versions = saidIn.map((path) => [path, /glibc (2\.\d+) or newer/.exec(readFileSync(fromRoot(path), 'utf8'))?.[1]]);
  const [[, version]] = versions;
  const other = versions.find((each) => each[1] !== version);
  if (version === undefined || other) throw new Error(`Not one glibc is said everywhere: ${JSON.stringify(versions)}`);
  return version;
}

/** The symbols of a binary that glibc `version` does not have, with the versions that have them. */
function newerThan(version, binary) {
  const symbols = execFileSync('objdump', ['-T', binary], { encoding: 'utf8', maxBuffer: 1 << 26 });
  const minor = Number(version.split('.')[1]);
  return [...symbols.matchAll(/\(GLIBC_2\.(\d+)[\d.]*\) +(\S+)$/gm)]
    .filter(([, asked]) => Number(asked) > minor)
    .map(([, asked, symbol]) => `${symbol} (2.${asked})`);
}

const given = process.argv.slice(2);
const built = [installedBinary(false), installedBinary(true), fromRoot('native/build/Release/kv.node')].filter(existsSync);
const binaries = given.length > 0 ? given : built;
try {
  if (binaries.length === 0) throw new Error('no binary is built; run node tools/build-native.mjs');
  const version = said();
  for (const binary of binaries) {
    const newer = newerThan(version, binary);
    if (newer.length === 0) continue;
    throw new Error(`${binary} must load with glibc ${version}, which lacks ${newer.join(', ')}; see native/glibc.`);
  }
  console.log(`check-glibc: ${binaries.length} binaries load with glibc ${version}`);
} catch (error) {
  console.error(`check-glibc: ${error.message}`);
  process.exitCode = 1;
}
