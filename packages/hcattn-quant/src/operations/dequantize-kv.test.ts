import { CapabilityError, DTypeError, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, Random, unitRoundoff } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { blockTokens, codeBits, groupDims, quantizedBlockBytes } from '../quantized-blocks.js';
import { dequantized, largestSteps, quantized, rotated, rotationRun, scales } from '../testing/quantized-oracle.js';
import { keyLikeRows, testBlocks } from '../testing/test-blocks.js';
import { dequantizeKv } from './dequantize-kv.js';
import { quantizeKv } from './quantize-kv.js';

const headDims = [1, 7, 20, 48, 64, 80, 96, 128, 192, 256, 512];
const dtypes = ['f32', 'f16', 'bf16'] as const;

const axes = ['block', 'blockToken', 'dim'] as const;

describeOnDevices('dequantizeKv', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it.each(headDims)('writes what bytes of every kind stand for, bit for bit, and no other block (heads of %i)', async (headDim) => {
    const random = new Random(headDim);
    for (const dtype of dtypes) {
      const [keyBits, valueBits] = [random.pick(codeBits), random.pick(codeBits)];
      const isRotated = random.next() < 0.7;
      const blocks = testBlocks(device, { dtype, headDim, blocks: 4, quantizedBlocks: 3, keyBits, valueBits });
      const [from, to] = [[2, 0, 2], [1, 3, 0]];
      for (const [pool, bits, dense] of [
        [blocks.quantizedKeys, keyBits, 'keys'],
        [blocks.quantizedValues, valueBits, 'values'],
      ] as const) {
        const bytes = quantizedBlockBytes(headDim, bits);
        // Scales whose sums stay within f16, and NaN here and there; codes of any kind.
        const contents = Uint8Array.from({ length: 3 * bytes }, (_, index) => {
          if (index % bytes < bytes - blockTokens * Math.ceil(headDim / groupDims)) return random.integer(0, 255);
          return random.next() < 0.01 ? 0xff : random.integer(0, 0xa0);
        });
        stream.write(pool, contents);
        dequantizeKv(stream, { ...blocks, rotated: isRotated, from, to });
        const given = decode(dtype, await blocks[dense].read());
        const length = blockTokens * headDim;
        const wanted = new Float64Array(4 * length);
        to.forEach((target, copy) => {
          const source = from[copy] ?? NaN;
          wanted.set(dequantized(contents.slice(source * bytes, (source + 1) * bytes), headDim, bits, isRotated), target * length);
        });
        expect(given).toEqual(decode(dtype, encode(dtype, wanted)));
      }
    }
  });

  it.each([8, 4, 3] as const)('gives back what quantizeKv was given, to half a step of each group (%i bits)', async (bits) => {
    const random = new Random(bits);
    for (const headDim of [20, 64, 80, 96, 128]) {
      for (const dtype of dtypes) {
        const numbers = keyLikeRows(random, 1, headDim);
        const sizes = { dtype, headDim, blocks: 2, quantizedBlocks: 1, keyBits: bits, valueBits: bits };
        const blocks = testBlocks(device, sizes, new Float64Array([...numbers, ...numbers]));
        quantizeKv(stream, { ...blocks, from: [0], to: [0] });
        dequantizeKv(stream, { ...blocks, from: [0], to: [1] });
        const stored = decode(dtype, encode(dtype, numbers));
        const result = decode(dtype, await blocks.keys.read()).slice(numbers.length);
        const run = rotationRun(headDim);
        for (let token = 0; token < blockTokens; token++) {
          const row = stored.slice(token * headDim, (token + 1) * headDim);
          const turned = rotated(row);
          const norm = Math.hypot(...row);
          const rounding = 2 * (Math.log2(run) + 6) * 2 ** -24 * norm * Math.sqrt(run);
          for (let first = 0; first < headDim; first += run) {
            // A rotation keeps lengths: the errors of a run are together as long as those of its rotated dims.
            let square = 0;
            for (let dim = first; dim < first + run; dim++) {
              const start = dim - (dim % groupDims);
              const magnitude = Math.max(...turned.slice(start, start + groupDims).map(Math.abs)) + rounding;
              square += ((magnitude / largestSteps[bits]) * 1.125) ** 2 / 4;
            }
            const own = row.slice(first, first + run);
            const errors = own.map((x, dim) => (result[token * headDim + first + dim] ?? NaN) - x);
            const bound = Math.sqrt(square) + rounding;
            const rounded = unitRoundoff[dtype] * (Math.hypot(...own) + bound) + 2 ** -25 * Math.sqrt(run);
            expect(Math.hypot(...errors)).toBeLessThanOrEqual(bound + rounded);
          }
        }
      }
    }
  });

  it('gives back plain rows as they were written, keys alone', async () => {
    const headDim = 48;
    const rows = keyLikeRows(new Random(6), 1, headDim);
    for (const keyBits of codeBits) {
      const sizes = { dtype: 'f32', headDim, blocks: 2, quantizedBlocks: 1, keyBits, valueBits: 8 } as const;
      const { keys, quantizedKeys } = testBlocks(device, sizes, new Float64Array([...rows, ...rows]));
      quantizeKv(stream, { keys, quantizedKeys, keyBits, rotated: false, from: [0], to: [0] });
      dequantizeKv(stream, { keys, quantizedKeys, keyBits, rotated: false, from: [0], to: [1] });
      const wanted = dequantized(quantized(decode('f32', encode('f32', rows)), headDim, keyBits, false), headDim, keyBits, false);
      expect(decode('f32', await keys.read()).slice(rows.length)).toEqual(wanted);
    }
  });

  it('shows a NaN in its own run of its own token', async () => {
    const headDim = 96;
    const rows = keyLikeRows(new Random(4), 1, headDim);
    rows[3 * headDim + 40] = NaN;
    const blocks = testBlocks(device, { dtype: 'f16', headDim, blocks: 1, quantizedBlocks: 1, keyBits: 8, valueBits: 4 }, rows, rows);
    quantizeKv(stream, { ...blocks, from: [0], to: [0] });
    dequantizeKv(stream, { ...blocks, from: [0], to: [0] });
    for (const pool of [blocks.keys, blocks.values]) {
      decode('f16', await pool.read()).forEach((x, index) => {
        const [token, dim] = [Math.floor(index / headDim), index % headDim];
        expect(Number.isNaN(x)).toBe(token === 3 && dim >= 32 && dim < 64);
      });
    }
  });

  it('gives any number a place: the largest scale is beyond f16, not beyond f32', async () => {
    const headDim = 64;
    for (const dtype of dtypes) {
      const blocks = testBlocks(device, { dtype, headDim, blocks: 1, quantizedBlocks: 1, keyBits: 8, valueBits: 4 });
      const bytes = new Uint8Array(quantizedBlockBytes(headDim, 8)).fill(127, 0, blockTokens * headDim).fill(0xf7, blockTokens * headDim);
      stream.write(blocks.quantizedKeys, bytes);
      stream.write(blocks.quantizedValues, new Uint8Array(quantizedBlockBytes(headDim, 4)));
      dequantizeKv(stream, { ...blocks, from: [0], to: [0] });
      const wanted = dequantized(bytes, headDim, 8);
      expect(Math.max(...wanted.map(Math.abs))).toBeGreaterThan(127 * (scales[0xf7] ?? NaN));
      expect(decode(dtype, await blocks.keys.read())).toEqual(decode(dtype, encode(dtype, wanted)));
    }
  });

  it('refuses bad input with a typed error, and writes nothing', async () => {
    const sizes = { dtype: 'f16', headDim: 64, blocks: 3, quantizedBlocks: 2, keyBits: 8, valueBits: 4 } as const;
    const blocks = testBlocks(device, sizes);
    const good = { ...blocks, from: [0, 1], to: [2, 0] };
    const refuse = (changed: object, error: new (...args: never[]) => Error) => {
      expect(() => {
        dequantizeKv(stream, { ...good, ...changed });
      }).toThrow(error);
    };
    for (const number of [-1, 2, 0.5, NaN, 2 ** 32]) refuse({ from: [0, number] }, InvalidValueError);
    for (const number of [-1, 3, 0.5, NaN, 2 ** 32]) refuse({ to: [0, number] }, InvalidValueError);
    refuse({ to: [1, 1] }, InvalidValueError);
    refuse({ from: [0] }, ShapeError);
    for (const bits of [1, 16, NaN, '8']) refuse({ keyBits: bits }, CapabilityError);
    refuse({ valueBits: 8 }, ShapeError);
    for (const part of ['values', 'quantizedValues', 'valueBits']) refuse({ [part]: undefined }, InvalidValueError);
    using short = device.tensor('f16', axes, [2, 32, 64]);
    refuse({ keys: short, values: short }, ShapeError);
    using floats = device.tensor('f32', axes, [3, blockTokens, 64]);
    refuse({ values: floats }, DTypeError);
    refuse({ values: blocks.keys }, InvalidValueError);
    expect((await blocks.keys.read(stream)).every((bits) => bits === 0)).toBe(true);
  });
});
