import { CapabilityError, DTypeError, type FloatDType, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { blockTokens, codeBits, type CodeBits, groupDims, quantizedBlockBytes } from '../quantized-blocks.js';
import { decoded, largestScale, largestSteps, quantized, rotated, rotationRun } from '../testing/quantized-oracle.js';
import { keyLikeRows, testBlocks } from '../testing/test-blocks.js';
import { quantizeKv } from './quantize-kv.js';

const headDims = [1, 7, 20, 48, 64, 80, 96, 128, 192, 256, 512];
const dtypes = ['f32', 'f16', 'bf16'] as const;

const block = <T extends Float64Array | Uint8Array>(all: T, length: number, number: number) =>
  all.slice(number * length, (number + 1) * length) as T;

describeOnDevices('quantizeKv', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  /** The keys' bytes of one block with these rows, `[token][dim]`. */
  async function bytesOf(rows: Float64Array, headDim: number, bits: CodeBits, dtype: FloatDType = 'f32'): Promise<Uint8Array> {
    const sizes = { dtype, headDim, blocks: 1, quantizedBlocks: 1, keyBits: bits, valueBits: 8 } as const;
    const blocks = testBlocks(device, sizes, rows);
    quantizeKv(stream, { ...blocks, from: [0], to: [0] });
    return blocks.quantizedKeys.read();
  }

  it.each(headDims)('writes the bytes that the format says, of keys and values, and no others (heads of %i)', async (headDim) => {
    const random = new Random(headDim);
    for (const dtype of dtypes) {
      const [keyBits, valueBits] = [random.pick(codeBits), random.pick(codeBits)];
      const isRotated = random.next() < 0.7;
      const sizes = { dtype, headDim, blocks: 4, quantizedBlocks: 6, keyBits, valueBits };
      const scale = random.pick([1e-6, 1, 1000]);
      const rows = () => keyLikeRows(random, 4, headDim).map((x) => x * scale);
      const [keys, values] = [rows(), rows()];
      const blocks = testBlocks(device, sizes, keys, values);
      const [from, to] = [[3, 0, 3], [5, 1, 2]];
      quantizeKv(stream, { ...blocks, rotated: isRotated, from, to });
      for (const [given, bits, numbers] of [
        [await blocks.quantizedKeys.read(), keyBits, keys],
        [await blocks.quantizedValues.read(), valueBits, values],
      ] as const) {
        const stored = decode(dtype, encode(dtype, numbers));
        const bytes = quantizedBlockBytes(headDim, bits);
        const wanted = new Uint8Array(6 * bytes).fill(0xa5);
        to.forEach((target, copy) => {
          wanted.set(quantized(block(stored, blockTokens * headDim, from[copy] ?? NaN), headDim, bits, isRotated), target * bytes);
        });
        expect(given).toEqual(wanted);
      }
    }
  });

  it.each([8, 4, 3, 2] as const)('loses at most half a step of each rotated dim, and no group takes larger steps than it needs (%i bits)', async (bits) => {
    const random = new Random(bits);
    for (const headDim of [20, 64, 80, 96, 128]) {
      const rows = keyLikeRows(random, 1, headDim).map(Math.fround);
      const result = decoded(await bytesOf(rows, headDim, bits), headDim, bits);
      for (let token = 0; token < blockTokens; token++) {
        const wanted = rotated(block(rows, headDim, token));
        const own = block(result, headDim, token);
        // Each stage of the rotation rounds once, as do its factor, the product with it, and the quotient by the step,
        // which for 4 bits has 8 added to it. All are relative to sums that are at most `norm`.
        const norm = Math.hypot(...wanted) * Math.sqrt(rotationRun(headDim));
        const rounding = (Math.log2(rotationRun(headDim)) + 6) * 2 ** -24 * norm;
        const excess = wanted.map((exact, dim) => {
          const group = wanted.slice(dim - (dim % groupDims), dim - (dim % groupDims) + groupDims);
          const magnitude = Math.max(...group.map(Math.abs));
          // Three bits of mantissa: a scale is at most 1/8 larger than the step that is wanted, or 2^-21.
          const step = Math.max(((magnitude + rounding) / largestSteps[bits]) * 1.125, 2 ** -21);
          // Codes of 2 bits reach to 1.5 steps, which are 0.6 of the largest magnitude or more.
          const most = bits === 2 ? Math.max(step / 2, 0.4 * (magnitude + rounding)) : step / 2;
          return Math.abs((own[dim] ?? NaN) - exact) - (most + rounding);
        });
        expect(Math.max(...excess)).toBeLessThanOrEqual(0);
      }
    }
  });

  it.each([8, 4, 3, 2] as const)('marks groups with NaN or infinity, and those alone; zeros are zeros (%i bits)', async (bits) => {
    // Runs of 32 dims, so that each group is rotated alone.
    const headDim = 96;
    for (const dtype of dtypes) {
      const rows = keyLikeRows(new Random(3), 1, headDim);
      const odd = [NaN, Infinity, -Infinity];
      odd.forEach((x, token) => (rows[token * headDim + 32 * token + 5] = x));
      rows.fill(0, 3 * headDim, 4 * headDim);
      rows.fill(-0, 4 * headDim, 5 * headDim);
      const bytes = await bytesOf(rows, headDim, bits, dtype);
      expect(bytes).toEqual(quantized(decode(dtype, encode(dtype, rows)), headDim, bits));
      const scaleBytes = bytes.slice(bytes.length - blockTokens * 3);
      for (let token = 0; token < 3; token++) {
        for (let group = 0; group < 3; group++) expect(scaleBytes[token * 3 + group] === 0xff).toBe(group === token);
      }
      expect([...scaleBytes.slice(9, 15)]).toEqual([0, 0, 0, 0, 0, 0]);
      const result = decoded(bytes, headDim, bits);
      expect(result.slice(3 * headDim, 5 * headDim).every((x) => x === 0)).toBe(true);
    }
  });

  it.each([8, 4, 3, 2] as const)('saturates where the largest scale is too small, from one end of f32 to the other (%i bits)', async (bits) => {
    const headDim = 32;
    const magnitudes = [1e-45, 1e-40, 1e-30, 1e-10, 1e-6, 6e4, 4e5, 5e5, 1e6, 1e20, 3e38];
    const rows = new Float64Array(blockTokens * headDim);
    magnitudes.forEach((magnitude, token) => {
      rows[token * headDim] = Math.fround(magnitude);
      rows[token * headDim + 1] = Math.fround(-magnitude);
    });
    const bytes = await bytesOf(rows, headDim, bits);
    expect(bytes).toEqual(quantized(rows, headDim, bits));
    expect(bytes[bytes.length - blockTokens + 9]).toBe(largestScale);
    // 3840 steps at the most, in the direction of the numbers.
    const result = decoded(bytes, headDim, bits);
    const wanted = rotated(block(rows, headDim, 9));
    wanted.forEach((x, dim) => {
      const most = 3840 * (bits === 8 ? 127 : 2 ** (bits - 1) - 0.5);
      if (x !== 0) expect(result[9 * headDim + dim]).toBe(Math.sign(x) * most);
    });
  });

  it('reads pools whose blocks or tokens lie apart', async () => {
    const random = new Random(8);
    const headDim = 48;
    const rows = keyLikeRows(random, 4, headDim);
    using both = device.tensor('f16', ['block', 'blockToken', 'dim'], [2, blockTokens, 2 * headDim], encode('f16', rows));
    const blocks = testBlocks(device, { dtype: 'f16', headDim, blocks: 2, quantizedBlocks: 2, keyBits: 8, valueBits: 4 });
    const keys = both.slice('dim', 0, headDim);
    const values = both.slice('dim', headDim, 2 * headDim);
    quantizeKv(stream, { ...blocks, keys, values, from: [1], to: [0] });
    const stored = decode('f16', encode('f16', rows));
    const part = (first: number) =>
      Float64Array.from({ length: blockTokens * headDim }, (_, index) => {
        const [token, dim] = [Math.floor(index / headDim), index % headDim];
        return stored[(blockTokens + token) * 2 * headDim + first + dim] ?? NaN;
      });
    expect(block(await blocks.quantizedKeys.read(), quantizedBlockBytes(headDim, 8), 0)).toEqual(quantized(part(0), headDim, 8));
    expect(block(await blocks.quantizedValues.read(), quantizedBlockBytes(headDim, 4), 0)).toEqual(quantized(part(headDim), headDim, 4));
  });

  it('writes keys alone where values are left out', async () => {
    for (const keyBits of codeBits) {
      const rows = keyLikeRows(new Random(keyBits), 2, 80);
      const all = testBlocks(device, { dtype: 'f32', headDim: 80, blocks: 2, quantizedBlocks: 2, keyBits, valueBits: 8 }, rows);
      const { keys, quantizedKeys } = all;
      quantizeKv(stream, { keys, quantizedKeys, keyBits, from: [1, 0], to: [0, 1] });
      const bytes = quantizedBlockBytes(80, keyBits);
      const given = await quantizedKeys.read();
      const stored = decode('f32', encode('f32', rows));
      for (const number of [0, 1]) {
        expect(block(given, bytes, number)).toEqual(quantized(block(stored, blockTokens * 80, 1 - number), 80, keyBits));
      }
    }
  });

  it('writes nothing where nothing is to be written', async () => {
    const blocks = testBlocks(device, { dtype: 'f32', headDim: 32, blocks: 1, quantizedBlocks: 1, keyBits: 8, valueBits: 4 });
    quantizeKv(stream, { ...blocks, from: [], to: [] });
    expect((await blocks.quantizedKeys.read()).every((byte) => byte === 0xa5)).toBe(true);
  });

  it('refuses bad input with a typed error, and writes nothing', async () => {
    const sizes = { dtype: 'f16', headDim: 64, blocks: 2, quantizedBlocks: 3, keyBits: 8, valueBits: 4 } as const;
    const blocks = testBlocks(device, sizes);
    const good = { ...blocks, from: [0, 1], to: [2, 0] };
    const refuse = (changed: object, error: new (...args: never[]) => Error) => {
      expect(() => {
        quantizeKv(stream, { ...good, ...changed });
      }).toThrow(error);
    };
    for (const number of [-1, 2, 0.5, NaN, 2 ** 32]) refuse({ from: [0, number] }, InvalidValueError);
    for (const number of [-1, 3, 0.5, NaN, 2 ** 32]) refuse({ to: [0, number] }, InvalidValueError);
    refuse({ to: [1, 1] }, InvalidValueError);
    refuse({ to: [0, 1, 2, 0] }, InvalidValueError);
    refuse({ from: [0] }, ShapeError);
    refuse({ from: undefined }, InvalidValueError);
    for (const bits of [1, 16, NaN, '8']) refuse({ keyBits: bits }, CapabilityError);
    refuse({ valueBits: 8 }, ShapeError);
    for (const part of ['values', 'quantizedValues', 'valueBits']) refuse({ [part]: undefined }, InvalidValueError);
    refuse({ rotated: 1 }, InvalidValueError);
    refuse({ quantizedKeys: blocks.quantizedValues }, InvalidValueError);
    const axes = ['block', 'blockToken', 'dim'] as const;
    using short = device.tensor('f16', axes, [2, 32, 64]);
    refuse({ keys: short, values: short }, ShapeError);
    using wide = device.tensor('f16', axes, [1, blockTokens, 544]);
    refuse({ keys: wide, values: wide, from: [0], to: [0] }, CapabilityError);
    using floats = device.tensor('f32', axes, [2, blockTokens, 64]);
    refuse({ values: floats }, DTypeError);
    const untouched = await blocks.quantizedKeys.read(stream);
    expect(untouched.every((byte) => byte === 0xa5)).toBe(true);
  });
});
