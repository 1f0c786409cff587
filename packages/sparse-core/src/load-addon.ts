import { createRequire } from 'node:module';
import type { Addon } from './addon.js';
import { CapabilityError } from './errors.js';

const require = createRequire(import.meta.url);

function candidates(): string[] {
  const platform = `@kv/sparse-core-${process.platform}-${process.arch}`;
  return [`${platform}-cuda`, platform];
}

function load(): Addon {
  const attempts: string[] = [];
  for (const name of candidates()) {
    try {
      return require(name) as Addon;
    } catch (cause) {
      const message = cause instanceof Error ? (cause.message.split('\n')[0] ?? '') : String(cause);
      attempts.push(`  ${name}: ${message}`);
    }
  }
  throw new CapabilityError(
    `No native binary for ${process.platform}-${process.arch} could be loaded. Tried:\n${attempts.join('\n')}\n` +
      'Install the platform package (npm install @kv/sparse-core-linux-x64; it needs glibc 2.28 or newer), ' +
      'or build it from a checkout with "npm start".',
    { subject: 'native binary', given: `${process.platform}-${process.arch}`, wanted: candidates() },
  );
}

let addon: Addon | undefined;

/** The native addon, loaded at the first use so that importing the package never fails. */
export function loadAddon(): Addon {
  addon ??= load();
  return addon;
}
