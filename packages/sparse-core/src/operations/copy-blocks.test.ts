import { expect, it } from 'vitest';
import { InvalidValueError, ShapeError } from '../errors.js';
import { Random } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { copyBlocks } from './copy-blocks.js';

describeOnDevices('copyBlocks', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it('copies whole blocks of any size and leaves the others alone', async () => {
    const random = new Random(31);
    for (let round = 0; round < 40; round++) {
      const [blocks, tokens, dim] = [random.integer(1, 30), random.integer(1, 9), random.integer(1, 40)];
      const bits = Uint16Array.from({ length: blocks * tokens * dim }, () => random.integer(0, 65_535));
      using pool = device.tensor('f16', ['block', 'blockToken', 'dim'], [blocks, tokens, dim], bits);
      const sources = random.integer(1, blocks);
      const to = Array.from({ length: random.integer(0, blocks - sources) }, (_, copy) => sources + copy).reverse();
      const from = to.map(() => random.integer(0, sources - 1));
      copyBlocks(stream, { pool, from, to });
      const wanted = bits.slice();
      const size = tokens * dim;
      to.forEach((block, copy) => {
        const source = from[copy] ?? NaN;
        wanted.set(bits.subarray(source * size, (source + 1) * size), block * size);
      });
      expect(await pool.read()).toEqual(wanted);
    }
  });

  it.each([
    ['lists of different lengths', [0, 1], [2]],
    ['a source outside the pool', [4], [2]],
    ['a target outside the pool', [0], [-1]],
    ['a target that is no whole number', [0], [1.5]],
    ['a target twice', [0, 1], [2, 2]],
    ['a target that is read', [0, 1], [1, 2]],
  ])('refuses %s', async (_, from, to) => {
    const bytes = Uint8Array.from({ length: 12 }, (__, index) => index);
    using pool = device.tensor('u8', ['block', 'byte'], [4, 3], bytes);
    expect(() => {
      copyBlocks(stream, { pool, from, to });
    }).toThrow(InvalidValueError);
    expect(await pool.read(stream)).toEqual(bytes);
  });

  it('refuses a pool with gaps between its blocks', () => {
    using pool = device.tensor('f32', ['block', 'dim'], [4, 3]);
    expect(() => {
      copyBlocks(stream, { pool: pool.slice('dim', 0, 2), from: [0], to: [1] });
    }).toThrow(ShapeError);
  });
});
