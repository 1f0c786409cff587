import { createRequire } from 'node:module';
import type { Addon } from './addon.js';
import type { InstructionSet } from './native-handles.js';
import { CapabilityError } from './errors.js';

const require = createRequire(import.meta.url);
const { version } = require('../package.json') as { version: string };

function candidates(): string[] {
  const platform = `@kv/sparse-core-${process.platform}-${process.arch}`;
  return [`${platform}-cuda`, platform];
}

/** @throws CapabilityError where no binary is published for */
function expectPlatform(): void {
  const { header } = process.report.getReport() as { header: { glibcVersionRuntime?: string | undefined } };
  const libc = process.platform === 'linux' && header.glibcVersionRuntime === undefined ? ' without glibc' : '';
  const given = `${process.platform}-${process.arch}${libc}`;
  if (given === 'linux-x64') return;
  throw new CapabilityError(
    `There is no native binary for ${given}: @kv runs on Linux on x64 with glibc; on another Linux, build it from a ` +
      'checkout with "npm start".',
    { subject: 'platform', given, wanted: 'linux-x64' },
  );
}

interface LoadedAddon {
  readonly addon: Addon;
  readonly packageName: string;
}

/**
 * The first platform package that loads and is of this package's version.
 * @throws CapabilityError when there is none; it says what was tried
 */
export function chooseAddon(load: (packageName: string) => unknown): LoadedAddon {
  const attempts: string[] = [];
  for (const packageName of candidates()) {
    try {
      const addon = load(packageName) as Addon;
      if (addon.version === version) return { addon, packageName };
      const { version: given = 'unknown' } = addon as Partial<Addon>;
      attempts.push(`  ${packageName}: its version is ${given}, and that of @kv/sparse-core ${version}; both must be one.`);
    } catch (cause) {
      const message = cause instanceof Error ? (cause.message.split('\n')[0] ?? '') : String(cause);
      attempts.push(`  ${packageName}: ${message}`);
    }
  }
  expectPlatform();
  throw new CapabilityError(
    `No native binary for ${process.platform}-${process.arch} could be loaded. Tried:\n${attempts.join('\n')}\n` +
      `Install the platform package (npm install @kv/sparse-core-linux-x64@${version}; it needs glibc 2.28 or newer), ` +
      'or build it from a checkout with "npm start".',
    { subject: 'native binary', given: `${process.platform}-${process.arch}`, wanted: candidates() },
  );
}

let loaded: LoadedAddon | undefined;

/** The native addon, loaded at the first use so that importing the package never fails. */
export function loadAddon(): Addon {
  loaded ??= chooseAddon(require);
  return loaded.addon;
}

/** Which native binary runs. */
export interface NativeBinary {
  readonly packageName: string;
  readonly version: string;
  /** The file that is loaded. */
  readonly path: string;
  /** The build of the CPU kernels that a device uses unless it asks for another: the widest that runs. */
  readonly instructionSet: InstructionSet;
  /**
   * Whether 'amx' runs. 'absent': the processor has no tile registers, the system does not save them, or the binary's
   * compiler knew none. 'refused': the system does not let this process use them.
   */
  readonly amx: 'absent' | 'refused' | 'ready';
}

/**
 * Describes the native binary, for diagnosis.
 * @throws CapabilityError when none can be loaded; it says what was tried
 */
export function nativeBinary(): NativeBinary {
  loaded ??= chooseAddon(require);
  const { addon, packageName } = loaded;
  return {
    packageName,
    version: addon.version,
    path: require.resolve(packageName),
    instructionSet: addon.instructionSet,
    amx: addon.amx(),
  };
}
