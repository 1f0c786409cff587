import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { createDevice } from './device.js';
import { InvalidValueError, KvError } from './errors.js';
import { rmsNorm } from './operations/rms-norm.js';

const device = createDevice({ threads: 2 });
const stream = device.defaultStream;

describe('a mapped file', () => {
  const folder = mkdtempSync(join(tmpdir(), 'kv-mapped-'));
  const path = join(folder, 'file');
  writeFileSync(path, new Uint8Array(64).fill(1));
  afterAll(() => {
    rmSync(folder, { recursive: true });
  });

  it('is read-only, in every view of it', async () => {
    using file = await device.mapFile(path);
    const tensor = file.tensor('f32', ['value'], [4], 0);
    using other = device.tensor('f32', ['value'], [4], new Float32Array(4));
    expect([tensor.readOnly, other.readOnly]).toEqual([true, false]);
    for (const view of [tensor, tensor.slice('value', 0, 4), tensor.view(['value'], [4])]) {
      expect(() => {
        stream.write(view, new Float32Array(4));
      }).toThrow(/read-only/);
      expect(() => {
        stream.copy(other, view);
      }).toThrow(InvalidValueError);
    }
    using weight = device.tensor('f32', ['value'], [4], new Float32Array(4));
    const rows = file.tensor('f32', ['token', 'value'], [1, 4], 0);
    expect(() => {
      rmsNorm(stream, { input: rows, weight, output: rows, epsilon: 1 });
    }).toThrow(expect.objectContaining({ code: 'KV_INVALID_VALUE' }));
    stream.copy(tensor, other);
    expect(await other.read()).toEqual(await tensor.read());
  });

  it('has a path', async () => {
    for (const given of [undefined, 7, {}, `${path}\0`, new URL('file:///')]) {
      await expect(device.mapFile(given as string)).rejects.toThrow(InvalidValueError);
    }
  });

  it.each([-1, 0.5, NaN, 2 ** 53, '0', 61, undefined])('has no tensor at the offset %s', async (offset) => {
    using file = await device.mapFile(path);
    expect(() => file.tensor('f32', ['value'], [1], offset as number)).toThrow(KvError);
  });
});
