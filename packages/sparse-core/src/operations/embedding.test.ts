import { open as openFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { createDevice } from '../device.js';
import { DeviceError, DTypeError, InvalidValueError, ShapeError } from '../errors.js';
import type { FloatDType } from '../dtype.js';
import { decode, Random } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { embedding } from './embedding.js';
import { linear } from './linear.js';
import type { Tensor } from '../handles.js';

const floats: readonly FloatDType[] = ['f32', 'f16', 'bf16'];

describeOnDevices('embedding', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it('copies or widens the rows exactly, over random shapes, strides and dtypes', async () => {
    const random = new Random(7);
    for (let round = 0; round < 60; round++) {
      const [rows, hidden, tokens] = [random.integer(1, 50), random.integer(1, 130), random.integer(0, 20)];
      const [dtype, idDType] = [random.pick(floats), random.pick(['i32', 'u32'] as const)];
      const data = random.elements(dtype, rows * (hidden + 3));
      const ids = Array.from({ length: tokens }, () => random.integer(0, rows - 1));
      using wide = device.tensor(dtype, ['vocabulary', 'hidden'], [rows, hidden + 3], data);
      const elements = idDType === 'i32' ? Int32Array.from(ids) : Uint32Array.from(ids);
      using idTensor = device.tensor(idDType, ['token'], [tokens], elements);
      using output = device.tensor(random.pick(['f32', dtype]), ['token', 'hidden'], [tokens, hidden]);
      embedding(stream, { table: wide.slice('hidden', 2, hidden + 2), ids: idTensor, output });
      const values = decode(dtype, data);
      const expected = ids.flatMap((id) => {
        const start = id * (hidden + 3) + 2;
        return [...values.subarray(start, start + hidden)];
      });
      expect([...decode(output.dtype, await output.read())]).toEqual(expected);
    }
  });

  it.each([
    ['i32', Int32Array.of(0, 4, -1), 'ids[2] is -1'],
    ['i32', Int32Array.of(5, 0, 0), 'ids[0] is 5'],
    ['u32', Uint32Array.of(0, 4294967295, 9), 'ids[1] is 4294967295'],
  ] as const)(
    'fails the stream and writes nothing when an %s id is outside the table',
    async (dtype, ids, named) => {
      const own = device.createStream();
      using table = device.tensor('f32', ['vocabulary', 'hidden'], [5, 2], new Float32Array(10).fill(1));
      using idTensor = device.tensor(dtype, ['token'], [3], ids);
      using output = device.tensor('f32', ['token', 'hidden'], [3, 2], new Float32Array(6).fill(7));
      embedding(own, { table, ids: idTensor, output });
      const failure: unknown = await own.synchronize().catch((error: unknown) => error);
      expect(failure).toBeInstanceOf(InvalidValueError);
      expect((failure as Error).message).toBe(`embedding: ${named}; the table has 5 rows, numbered from 0`);
      expect(await output.read(stream)).toEqual(new Float32Array(6).fill(7));
    },
  );

  it('gives NaN for ids outside the table where that is asked for, and the other rows as they are', async () => {
    const random = new Random(8);
    for (const dtype of floats) {
      for (const outputDType of ['f32', dtype] as const) {
        const data = random.elements(dtype, 5 * 67);
        using table = device.tensor(dtype, ['vocabulary', 'hidden'], [5, 67], data);
        using ids = device.tensor('i32', ['token'], [5], Int32Array.of(4, -1, 0, 5, 3));
        using output = device.tensor(outputDType, ['token', 'hidden'], [5, 67]);
        embedding(stream, { table, ids, output, outside: 'nan' });
        const rows = decode(outputDType, await output.read());
        const row = (values: ArrayLike<number>, index: number) => Array.from(values).slice(index * 67, (index + 1) * 67);
        const values = decode(dtype, data);
        for (const [place, id] of [[0, 4], [2, 0], [4, 3]] as const) expect(row(rows, place)).toEqual(row(values, id));
        for (const place of [1, 3]) expect(row(rows, place).every(Number.isNaN)).toBe(true);
      }
    }
  });

  it('refuses bad input with a typed error', () => {
    using table = device.tensor('bf16', ['vocabulary', 'hidden'], [5, 8]);
    using ids = device.tensor('i32', ['token'], [3]);
    using output = device.tensor('f32', ['token', 'hidden'], [3, 8]);
    using halves = device.tensor('f16', ['token', 'hidden'], [3, 8]);
    using bytes = device.tensor('u8', ['token'], [3]);
    using integers = device.tensor('i32', ['vocabulary', 'hidden'], [5, 8]);
    using foreign = open().tensor('i32', ['token'], [3]);
    const good = { table, ids, output };
    expect(() => embedding(stream, { ...good, ids: ids.slice('token', 0, 2) })).toThrow(ShapeError);
    expect(() => embedding(stream, { ...good, table: table.slice('hidden', 0, 7) })).toThrow(ShapeError);
    expect(() => embedding(stream, { ...good, output: halves as never })).toThrow(DTypeError);
    expect(() => embedding(stream, { ...good, ids: bytes as never })).toThrow(DTypeError);
    expect(() => embedding(stream, { ...good, table: integers as never })).toThrow(DTypeError);
    expect(() => embedding(stream, { ...good, ids: foreign })).toThrow(DeviceError);
  });
});

describe('a table of more rows than an i32 counts', () => {
  const rows = 2 ** 31 + 4;
  const device = createDevice({ threads: 1 });
  const stream = device.createStream();

  /** All holes but its last row, so that it takes no space. */
  async function withTable(use: (table: Tensor<'f16', readonly ['row', 'feature']>) => Promise<void>): Promise<void> {
    const path = join(tmpdir(), `kv-rows-${process.pid}`);
    const file = await openFile(path, 'w');
    try {
      await file.write(Uint16Array.of(0x3c00), 0, 2, 2 * (rows - 1));
      await file.close();
      using mapped = await device.mapFile(path);
      await use(mapped.tensor('f16', ['row', 'feature'], [rows, 1], 0));
    } finally {
      await rm(path);
    }
  }

  it('gives every row that an id names', async () => {
    await withTable(async (table) => {
      using ids = device.tensor('u32', ['token'], [3], Uint32Array.of(rows - 1, 0, rows - 2));
      using output = device.tensor('f32', ['token', 'feature'], [3, 1]);
      embedding(stream, { table, ids, output });
      expect(await output.read()).toEqual(Float32Array.of(1, 0, 0));
      using outside = device.tensor('u32', ['token'], [3], Uint32Array.of(rows, 0, 0));
      embedding(stream, { table, ids: outside, output, outside: 'nan' });
      expect(await output.read()).toEqual(Float32Array.of(NaN, 0, 0));
    });
  });

  it('is refused, with its axis, by operations that count with an i32', async () => {
    await withTable((table) => {
      using input = device.tensor('f32', ['token', 'feature'], [1, 1]);
      using output = device.tensor('f32', ['token', 'row'], [1, 1]);
      const refused = (): void => {
        linear(stream, { input, weight: table, output });
      };
      expect(refused).toThrow(ShapeError);
      expect(refused).toThrow(`weight is f16 [row=${rows}, feature=1]; the kernels count row up to 2147483647.`);
      return Promise.resolve();
    });
  });
});
