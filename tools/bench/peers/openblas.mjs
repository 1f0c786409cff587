// Debian's OpenBLAS: the reference of the linear layers. Found or fetched here, never a dependency.
import { execFileSync, spawnSync } from 'node:child_process';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { cacheFolder } from '../cache.mjs';

const PACKAGES = ['libopenblas-pthread-dev', 'libopenblas0-pthread', 'libgfortran5', 'libquadmath0'];
const COMPILES = ['-x', 'c++', '-', '-lopenblas', '-o', '/dev/null'];

/** What the compiler needs beyond `-lopenblas`: nothing where it is installed, else the unpacked packages. */
export function openblasFlags() {
  const installed = spawnSync('g++', COMPILES, { input: '#include <cblas.h>\nint main() {}\n' }).status === 0;
  if (installed) return [];
  const folder = cacheFolder('openblas');
  const triple = execFileSync('gcc', ['-print-multiarch'], { encoding: 'utf8' }).trim();
  const libraries = join(folder, 'usr/lib', triple, 'openblas-pthread');
  if (!existsSync(libraries)) {
    execFileSync('apt-get', ['download', ...PACKAGES], { cwd: folder, stdio: 'inherit' });
    for (const file of readdirSync(folder).filter((name) => name.endsWith('.deb'))) {
      execFileSync('dpkg-deb', ['--extract', join(folder, file), folder]);
    }
  }
  const paths = [libraries, join(folder, 'usr/lib', triple)];
  const include = join(folder, 'usr/include', triple, 'openblas-pthread');
  return [`-I${include}`, ...paths.flatMap((path) => [`-L${path}`, `-Wl,-rpath,${path}`])];
}

/**
 * The environment for its best kernels. Version 0.3.21 does not know the newest processors and gives them its
 * AVX2 kernels; those for AVX-512 are nearly twice as fast.
 */
export function openblasEnvironment(threads) {
  const avx512 = /\bavx512bw\b/.test(readFileSync('/proc/cpuinfo', 'utf8'));
  return { OPENBLAS_NUM_THREADS: String(threads), ...(avx512 && { OPENBLAS_CORETYPE: 'SkylakeX' }) };
}
