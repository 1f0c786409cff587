import { InvalidValueError, ShapeError } from '@kv/sparse-core';
import { describeOnDevices, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { filledWith, placeSequences, randomSequences, spoiltSequences } from '../testing/random-sequences.js';
import { forgetBlocks } from './forget-blocks.js';

describeOnDevices('forgetBlocks', ({ open }) => {
  it('forgets the blocks that hold tokens of the slots, and no others', async () => {
    const device = open();
    const stream = device.createStream();
    for (let seed = 0; seed < 12; seed++) {
      const random = new Random(seed);
      const [kvHeads, blockTokens, width, slotCount] = [random.integer(1, 4), random.integer(1, 9), random.integer(1, seed % 4 === 0 ? 700 : 20), 3];
      const sequences = randomSequences(random, { kvHeads, blockTokens, width, slotCount });
      const { table, counts } = sequences;
      const wanted = Int32Array.from({ length: table.length }, () => random.integer(-1, 99));
      const { blockTable, keyCounts } = placeSequences(device, sequences);
      const where = device.tensor('i32', ['hostBlock'], [wanted.length], wanted);
      const [first, end] = seed % 3 === 0 ? [0, slotCount] : [seed % 3, (seed % 3) + 1];
      forgetBlocks(stream, { blockTable: blockTable.slice('slot', first, end), keyCounts: keyCounts.slice('slot', first, end), where, blockTokens });
      for (let head = first * kvHeads; head < end * kvHeads; head++) {
        for (let block = 0; block * blockTokens < (counts[head] ?? NaN); block++) wanted[table[head * width + block] ?? NaN] = -1;
      }
      expect(await where.read(stream), `seed ${seed}`).toEqual(wanted);
    }
  });

  const good = () => {
    const device = open();
    const sequences = randomSequences(new Random(1), { kvHeads: 1, blockTokens: 4, width: 9, slotCount: 2 });
    const { blockTable, keyCounts } = placeSequences(device, { ...sequences, counts: new Int32Array(2).fill(33) });
    return { blockTable, keyCounts, where: device.tensor('i32', ['hostBlock'], [18], new Int32Array(18)), blockTokens: 4 };
  };

  it.each(spoiltSequences.filter(([, name]) => name === 'keyCounts' || name === 'blockTable'))('refuses sequences of which one %s', async (_, name, number) => {
    const args = good();
    const stream = args.where.device.createStream();
    forgetBlocks(stream, { ...args, [name]: filledWith(args[name as 'keyCounts'], number) });
    await expect(stream.synchronize()).rejects.toThrow(InvalidValueError);
  });

  it('refuses bad input with a typed error', async () => {
    const args = good();
    const { device } = args.where;
    const stream = device.createStream();
    expect(() => {
      forgetBlocks(stream, { ...args, blockTokens: 0 });
    }).toThrow(InvalidValueError);
    expect(() => {
      forgetBlocks(stream, { ...args, keyCounts: device.tensor('i32', ['slot', 'kvHead'], [1, 1]) });
    }).toThrow(ShapeError);
    forgetBlocks(stream, args);
    await stream.synchronize();
  });
});
