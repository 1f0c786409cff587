import { describe, expect, it } from 'vitest';
import { createDevice } from './device.js';
import { DisposedError, InvalidValueError, KvError, OutOfMemoryError, ShapeError } from './errors.js';
import type { TensorHandle } from './handles.js';

describe('tensors', () => {
  const device = createDevice({ threads: 2 });

  it('keeps shape, strides and contents through slices and views', async () => {
    const data = Float32Array.from({ length: 24 }, (_, index) => index);
    using tensor = device.tensor('f32', ['token', 'head', 'dim'], [2, 3, 4], data);
    expect(tensor.strides).toEqual([12, 4, 1]);
    expect(await tensor.read()).toEqual(data);
    const slice = tensor.slice('head', 1, 3);
    expect(slice.shape).toEqual([2, 2, 4]);
    expect(Array.from(await slice.read())).toEqual([4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 20, 21, 22, 23]);
    expect(Array.from(await tensor.view(['row', 'pair'], [12, 2]).slice('pair', 1, 2).read())).toEqual(
      Array.from({ length: 12 }, (_, row) => 2 * row + 1),
    );
  });

  it('views strided elements under other axes where none has to move', () => {
    using rows = device.tensor('f32', ['token', 'feature'], [5, 24]);
    const part = rows.slice('feature', 6, 18).slice('token', 1, 4);
    expect(part.view(['token', 'head', 'dim'], [3, 2, 6]).strides).toEqual([24, 6, 1]);
    expect(part.view(['row', 'one', 'feature'], [3, 1, 12]).strides).toEqual([24, 12, 1]);
    expect(rows.slice('feature', 0, 1).view(['pair', 'member'], [1, 5]).strides).toEqual([120, 24]);
    expect(part.slice('token', 0, 0).view(['head', 'dim'], [0, 7]).shape).toEqual([0, 7]);
    expect(() => part.view(['head', 'token', 'dim'], [2, 3, 6])).toThrow(ShapeError);
  });

  it('names its axes in the type', () => {
    using tensor = device.tensor('f32', ['token', 'head'], [2, 3]);
    const wanted = (handle: TensorHandle<'f32', readonly ['head', 'token']>) => handle.shape;
    // @ts-expect-error the axes are the other way round
    expect(wanted(tensor)).toEqual([2, 3]);
  });

  it('wraps memory of JavaScript without a copy, shared memory too', async () => {
    for (const buffer of [new ArrayBuffer(16), new SharedArrayBuffer(16)]) {
      const memory = new Float32Array(buffer);
      using tensor = device.wrap('f32', ['value'], [4], memory);
      memory[2] = 7;
      expect(Array.from(await tensor.read())).toEqual([0, 0, 7, 0]);
      device.defaultStream.write(tensor, new Float32Array([1, 2, 3, 4]));
      await device.defaultStream.synchronize();
      expect(Array.from(memory)).toEqual([1, 2, 3, 4]);
    }
  });

  it('returns memory when disposed, after enqueued work', async () => {
    const before = device.memory().live;
    const tensor = device.tensor('f32', ['value'], [1 << 20], new Float32Array(1 << 20).fill(3));
    expect(device.memory().live - before).toBe(4 << 20);
    const pending = tensor.read();
    tensor.dispose();
    expect((await pending)[1 << 19]).toBe(3);
    await device.defaultStream.synchronize();
    expect(device.memory().live).toBe(before);
  });

  it('refuses use after dispose, of a view of it too', async () => {
    const tensor = device.tensor('f32', ['value'], [4]);
    const view = tensor.slice('value', 1, 3);
    tensor.dispose();
    tensor.dispose();
    await expect(tensor.read()).rejects.toThrow(DisposedError);
    await expect(view.read()).rejects.toThrow(DisposedError);
  });

  it('refuses malformed shapes and ranges, saying what is wanted', () => {
    expect(() => device.tensor('f32', ['value'], [-1])).toThrow(ShapeError);
    expect(() => device.tensor('f32', ['value'], [1.5])).toThrow(ShapeError);
    expect(() => device.tensor('f32', ['value'], [4], new Float32Array(3))).toThrow(ShapeError);
    using tensor = device.tensor('f32', ['token', 'dim'], [4, 2]);
    expect(() => tensor.slice('token', 3, 5)).toThrow(/3\.\.5.*token=4/);
    expect(() => tensor.slice('head' as 'token', 0, 1)).toThrow(ShapeError);
    using wide = device.tensor('f32', ['token', 'dim'], [4, 3]);
    expect(() => wide.slice('dim', 0, 2).view(['all'], [8])).toThrow(/joins only axes/);
    expect(() => wide.view(['all'], [11])).toThrow(ShapeError);
  });

  it('refuses what does not fit, and allocates nothing', () => {
    const small = createDevice({ threads: 1, memoryLimit: 1000 });
    using first = small.tensor('u8', ['byte'], [600]);
    expect(() => small.tensor('u8', ['byte'], [401])).toThrow(OutOfMemoryError);
    expect(() => small.tensor('f32', ['byte'], [2 ** 52])).toThrow(OutOfMemoryError);
    expect(small.memory()).toMatchObject({ live: first.byteLength, limit: 1000 });
  });

  it('refuses options out of their domain', () => {
    expect(() => createDevice({ threads: 0 })).toThrow(InvalidValueError);
    expect(() => createDevice({ kind: 'abacus' as 'cpu' })).toThrow(KvError);
    expect(() => createDevice({ instructionSet: 'sse9' as 'avx2' })).toThrow(/sse9/);
  });
});
