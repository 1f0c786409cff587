import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { CapabilityError } from './errors.js';
import { chooseAddon, loadAddon, nativeBinary } from './load-addon.js';

const { version } = JSON.parse(readFileSync(new URL('../package.json', import.meta.url), 'utf8')) as { version: string };
const cpu = `@kv/sparse-core-${process.platform}-${process.arch}`;
const cuda = `${cpu}-cuda`;

/** Loads what `packages` has; the others are not installed. */
function from(packages: Record<string, unknown>) {
  return (name: string) => {
    if (name in packages) return packages[name];
    throw new Error(`Cannot find module '${name}'`);
  };
}

describe('the native binary', () => {
  it('is that with CUDA where there is one of the same version', () => {
    const packages = { [cpu]: { version }, [cuda]: { version } };
    expect(chooseAddon(from(packages))).toEqual({ addon: packages[cuda], packageName: cuda });
    expect(chooseAddon(from({ [cpu]: { version } })).packageName).toBe(cpu);
  });

  it('is not one of another version, even if it has CUDA', () => {
    for (const other of [{ version: '0.0.9' }, { version: `${version}-rc.1` }, {}]) {
      expect(chooseAddon(from({ [cpu]: { version }, [cuda]: other })).packageName).toBe(cpu);
    }
  });

  it('says both versions where none fits', () => {
    const choose = () => chooseAddon(from({ [cpu]: { version: '7.8.9' }, [cuda]: {} }));
    expect(choose).toThrow(CapabilityError);
    expect(choose).toThrow(`${cpu}: its version is 7.8.9, and that of @kv/sparse-core ${version}`);
    expect(choose).toThrow(`${cuda}: its version is unknown`);
    expect(choose).toThrow(`npm install @kv/sparse-core-linux-x64@${version}`);
  });

  it('that runs was built for this package', () => {
    expect([loadAddon().version, nativeBinary().version]).toEqual([version, version]);
  });
});
