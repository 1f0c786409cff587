import { createRequire } from 'node:module';
import type { Addon, InstructionSet } from './addon.js';
import { CapabilityError } from './errors.js';

const require = createRequire(import.meta.url);

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

function load(): LoadedAddon {
  const attempts: string[] = [];
  for (const packageName of candidates()) {
    try {
      return { addon: require(packageName) as Addon, packageName };
    } catch (cause) {
      const message = cause instanceof Error ? (cause.message.split('\n')[0] ?? '') : String(cause);
      attempts.push(`  ${packageName}: ${message}`);
    }
  }
  expectPlatform();
  throw new CapabilityError(
    `No native binary for ${process.platform}-${process.arch} could be loaded. Tried:\n${attempts.join('\n')}\n` +
      'Install the platform package (npm install @kv/sparse-core-linux-x64; it needs glibc 2.28 or newer), ' +
      'or build it from a checkout with "npm start".',
    { subject: 'native binary', given: `${process.platform}-${process.arch}`, wanted: candidates() },
  );
}

let loaded: LoadedAddon | undefined;

/** The native addon, loaded at the first use so that importing the package never fails. */
export function loadAddon(): Addon {
  loaded ??= load();
  return loaded.addon;
}

/** Which native binary runs. */
export interface NativeBinary {
  readonly packageName: string;
  readonly version: string;
  /** The file that is loaded. */
  readonly path: string;
  /** The widest build of the CPU kernels that this processor runs. */
  readonly instructionSet: InstructionSet;
}

/**
 * Describes the native binary, for diagnosis.
 * @throws CapabilityError when none can be loaded; it says what was tried
 */
export function nativeBinary(): NativeBinary {
  loaded ??= load();
  const { addon, packageName } = loaded;
  const { version } = require(`${packageName}/package.json`) as { version: string };
  return { packageName, version, path: require.resolve(packageName), instructionSet: addon.instructionSet };
}
