import { InvalidValueError, ShapeError } from '@kv/sparse-core';
import { describeOnDevices, expectRefusals, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { filledWith, placeSequences, randomSequences, spoiltSequences } from '../testing/random-sequences.js';
import { selectTopBlocks } from './select-top-blocks.js';

describeOnDevices('selectTopBlocks', ({ open }) => {
  it('takes the first and the last blocks, and the best between them, of equal ones the lower', async () => {
    const device = open();
    const stream = device.createStream();
    const random = new Random(5);
    for (let round = 0; round < 40; round++) {
      const [kvHeads, blockTokens, width, slotCount] = [random.integer(1, 3), random.pick([1, 32]), random.integer(1, 60), 3];
      const sequences = randomSequences(random, { kvHeads, blockTokens, width, slotCount });
      const [sinkBlocks, recentBlocks] = [random.integer(0, 2), random.integer(1, 3)];
      const room = sinkBlocks + recentBlocks + random.pick([0, 1, 5, 20, 64]);
      const rows = (sequences.queryStart.at(-1) ?? NaN) + 1;
      // Few different scores, so that many are equal; and odd ones.
      const scores = Float32Array.from({ length: rows * kvHeads * width }, () =>
        random.integer(0, 9) === 0 ? random.pick([NaN, Infinity, -Infinity, -0, 0]) : Math.round(random.normal() * random.pick([1, 1000])),
      );
      const budgets = Int32Array.from({ length: slotCount }, () => random.integer(sinkBlocks + recentBlocks - 1, room + 1));
      const counts = [slotCount, kvHeads] as const;
      const batch = placeSequences(device, sequences);
      const args = {
        ...{ ...batch, blockTokens, sinkBlocks, recentBlocks },
        scores: device.tensor('f32', ['token', 'kvHead', 'block'], [rows, kvHeads, width], scores),
        chosen: device.tensor('i32', ['slot', 'kvHead', 'chosenBlock'], [...counts, room], new Int32Array(slotCount * kvHeads * room).fill(-7)),
        chosenCounts: device.tensor('i32', ['slot', 'kvHead'], counts, new Int32Array(slotCount * kvHeads).fill(-7)),
        budgets: device.tensor('i32', ['slot'], [slotCount], budgets),
      };
      selectTopBlocks(stream, args);
      const wanted = Array.from({ length: slotCount * kvHeads }, () => [-7] as number[]);
      sequences.slots.forEach((slot, entry) => {
        if (sequences.rows[entry] === 0) return;
        const budget = Math.max(sinkBlocks + recentBlocks, Math.min(room, budgets[slot] ?? NaN));
        for (let head = 0; head < kvHeads; head++) {
          const blocks = Math.ceil((sequences.counts[slot * kvHeads + head] ?? NaN) / blockTokens);
          const all = Array.from({ length: blocks }, (_, block) => block);
          const own = scores.subarray(((sequences.queryStart[entry] ?? NaN) * kvHeads + head) * width);
          const score = (block: number) => (Number.isNaN(own[block]) ? -Infinity : (own[block] ?? NaN));
          const isNumber = (block: number) => (Number.isNaN(own[block]) ? 0 : 1);
          const middle = all.slice(sinkBlocks, blocks - recentBlocks);
          const difference = (one: number, other: number) => (score(one) === score(other) ? 0 : score(other) - score(one));
          const best = middle.sort((one, other) => difference(one, other) || isNumber(other) - isNumber(one) || one - other);
          const top = best.slice(0, budget - sinkBlocks - recentBlocks).sort((one, other) => one - other);
          wanted[slot * kvHeads + head] = blocks <= budget ? all : [...all.slice(0, sinkBlocks), ...top, ...all.slice(blocks - recentBlocks)];
        }
      });
      const [chosen, chosenCounts] = [await args.chosen.read(stream), await args.chosenCounts.read(stream)];
      wanted.forEach((list, head) => {
        expect(chosenCounts[head]).toBe(list[0] === -7 ? -7 : list.length);
        expect(Array.from(chosen.subarray(head * room, head * room + list.length))).toEqual(list);
      });
    }
  });

  const good = () => {
    const device = open();
    const sequences = randomSequences(new Random(1), { kvHeads: 2, blockTokens: 4, width: 9, slotCount: 2 });
    return {
      ...placeSequences(device, { ...sequences, counts: new Int32Array(4).fill(33), slots: Int32Array.of(1), queryStart: Int32Array.of(0, 1) }),
      ...{ blockTokens: 4, sinkBlocks: 1, recentBlocks: 2 },
      scores: device.tensor('f32', ['token', 'kvHead', 'block'], [1, 2, 9], new Float32Array(18)),
      chosen: device.tensor('i32', ['slot', 'kvHead', 'chosenBlock'], [2, 2, 4]),
      chosenCounts: device.tensor('i32', ['slot', 'kvHead'], [2, 2]),
      budgets: device.tensor('i32', ['slot'], [2], Int32Array.of(4, 4)),
    };
  };

  // It reads no table.
  it.each(spoiltSequences.filter(([, name]) => name !== 'blockTable'))('refuses a batch that %s', async (_, name, number) => {
    const args = good();
    const stream = args.scores.device.createStream();
    selectTopBlocks(stream, { ...args, [name]: filledWith(args[name], number) });
    await expect(stream.synchronize()).rejects.toThrow(InvalidValueError);
  });

  it('refuses bad input with a typed error', async () => {
    const args = good();
    const { device } = args.scores;
    const stream = device.createStream();
    expectRefusals(selectTopBlocks, stream, args, [
      [{ sinkBlocks: 3 }, InvalidValueError],
      [{ sinkBlocks: -1 }, InvalidValueError],
      [{ recentBlocks: 0 }, InvalidValueError],
      [{ recentBlocks: 1.5 }, InvalidValueError],
      [{ blockTokens: 0 }, InvalidValueError],
      [{ chosen: device.tensor('i32', ['slot', 'kvHead', 'chosenBlock'], [2, 1, 4]) }, ShapeError],
      [{ budgets: device.tensor('i32', ['slot'], [3]) }, ShapeError],
      [{ scores: device.tensor('f32', ['token', 'kvHead', 'block'], [1, 1, 9]) }, ShapeError],
    ]);
    selectTopBlocks(stream, args);
    await stream.synchronize();
  });
});
