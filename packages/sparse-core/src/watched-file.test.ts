import { readdirSync, readlinkSync } from 'node:fs';
import { join } from 'node:path';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';

import { expect, it } from 'vitest';

import { createDevice } from './device.js';
import { DisposedError, ModelFormatError } from './errors.js';
import { eventually } from './testing/eventually.js';
import { withDirectory } from './testing/safetensors-file.js';
import { WatchedFile } from './watched-file.js';

function descriptorsOf(path: string): number {
  const target = (descriptor: string): string => {
    try {
      return readlinkSync(`/proc/self/fd/${descriptor}`);
    } catch {
      return '';
    }
  };
  return readdirSync('/proc/self/fd').filter((descriptor) => target(descriptor) === path).length;
}

it.skipIf(process.platform !== 'linux')('closes a file that nobody disposed of, without a warning', () =>
  withDirectory({ weights: 'some' }, async (directory) => {
    setFlagsFromString('--expose-gc');
    const collectGarbage = runInNewContext('gc') as () => void;
    const warnings: Error[] = [];
    const warned = (warning: Error): void => void warnings.push(warning);
    process.on('warning', warned);
    const path = join(directory, 'weights');
    const device = createDevice({ threads: 1 });
    for (let file = 0; file < 4; file++) await device.mapFile(path);
    expect(descriptorsOf(path)).toBeGreaterThan(0);
    await eventually(() => {
      collectGarbage();
      return descriptorsOf(path) === 0;
    });
    process.removeListener('warning', warned);
    expect(descriptorsOf(path)).toBe(0);
    expect(warnings).toEqual([]);
  }));

it('is refused after it was disposed, however often that was', () =>
  withDirectory({ weights: 'some' }, async (directory) => {
    const file = await createDevice({ threads: 1 }).mapFile(join(directory, 'weights'));
    file.assertUnchanged();
    file.dispose();
    // Its descriptor is another file's now, which it must not close.
    using other = await WatchedFile.open(join(directory, 'weights'));
    file.dispose();
    other.assertUnchanged();
    expect(() => {
      file.assertUnchanged();
    }).toThrow(DisposedError);
  }));

it('that cannot be opened is no file of a model', async () => {
  await expect(WatchedFile.open(join('no', 'such', 'file'))).rejects.toThrow(ModelFormatError);
});
