import { type Device, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { describeOnDevices, expectRefusals, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { filledWith, placeSequences, type RandomSequences, randomSequences, spoiltSequences } from '../testing/random-sequences.js';
import { placeBlocks } from './place-blocks.js';

interface Cache {
  readonly where: Int32Array;
  readonly holds: Int32Array;
  readonly usedAt: Int32Array;
}

const firstCached = 100;

/** A cache that holds some of the blocks, and says of some places what is no longer true. */
function randomCache(random: Random, hostBlocks: number, cached: number): Cache {
  const [where, holds, usedAt] = [new Int32Array(hostBlocks).fill(-1), new Int32Array(cached).fill(-1), new Int32Array(cached)];
  const blocks = random.permutation(hostBlocks);
  for (let place = 0; place < Math.min(cached, hostBlocks); place++) {
    const block = blocks[place] ?? NaN;
    if (random.integer(0, 2) === 0) continue;
    holds[place] = block;
    usedAt[place] = random.integer(1, 9);
    if (random.integer(0, 3) > 0) where[block] = firstCached + place;
  }
  return { where, holds, usedAt };
}

function place(device: Device, { where, holds, usedAt }: Cache, loads: number) {
  return {
    where: device.tensor('i32', ['hostBlock'], [where.length], where),
    holds: device.tensor('i32', ['cachedBlock'], [holds.length], holds),
    usedAt: device.tensor('i32', ['cachedBlock'], [usedAt.length], usedAt),
    loads: device.tensor('i32', ['end', 'load'], [2, loads]),
    loadCount: device.tensor('i32', ['one'], [1], Int32Array.of(-7)),
    firstCached,
  };
}

/** The definition. Changes the cache. */
function placed(sequences: RandomSequences, sources: Int32Array, sinkBlocks: number, { where, holds, usedAt }: Cache): number[][] {
  const { kvHeads, blockTokens, width, table, counts, slots, rows } = sequences;
  const free = Array.from(holds.keys()).filter((index) => where[holds[index] ?? -1] !== firstCached + index);
  const loads: number[][] = [];
  slots.forEach((slot, entry) => {
    const heads = Array.from({ length: kvHeads }, (_, head) => slot * kvHeads + head);
    const filled = heads.map((head) => {
      const [tokens, added] = [counts[head] ?? NaN, rows[entry] ?? NaN];
      const first = Math.floor(Math.max(0, tokens - added) / blockTokens);
      return Array.from({ length: added === 0 ? 0 : Math.floor(tokens / blockTokens) - first }, (_, index) => ({ block: first + index, at: head * width + first + index }));
    });
    for (let nth = 0; nth < width; nth++) {
      for (const { block, at } of filled.flatMap((blocks) => blocks.slice(nth, nth + 1))) {
        const hostBlock = table[at] ?? NaN;
        if (block < sinkBlocks || (where[hostBlock] ?? -1) >= 0) continue;
        const index = free.shift();
        if (index === undefined) continue;
        [holds[index], usedAt[index], where[hostBlock]] = [hostBlock, 0, firstCached + index];
        loads.push([sources[at] ?? NaN, firstCached + index]);
      }
    }
  });
  return loads;
}

describeOnDevices('placeBlocks', ({ open }) => {
  it('gives filled blocks the places that hold nothing, and no others', async () => {
    const device = open();
    const stream = device.createStream();
    let count = 0;
    for (let seed = 0; seed < 32; seed++) {
      const random = new Random(seed);
      const [kvHeads, blockTokens, width, slotCount] = [random.integer(1, 4), 4, random.integer(3, seed % 8 === 0 ? 1500 : 30), 3];
      const sequences = randomSequences(random, { kvHeads, blockTokens, width, slotCount, mostRows: width * blockTokens });
      const hostBlocks = slotCount * kvHeads * width;
      const cache = randomCache(random, hostBlocks, random.integer(1, 2 * hostBlocks));
      const sources = random.permutation(hostBlocks);
      const sinkBlocks = random.integer(0, 2);
      const args = {
        ...placeSequences(device, sequences),
        ...place(device, cache, sequences.slots.length * kvHeads * width + random.integer(0, 3)),
        sourceTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [slotCount, kvHeads, width], sources),
        ...{ rows: sequences.queryStart.at(-1) ?? 0, blockTokens, sinkBlocks },
      };
      placeBlocks(stream, args);
      const wanted = placed(sequences, sources, sinkBlocks, cache);
      const [loads, loadCount] = [await args.loads.read(stream), await args.loadCount.read(stream)];
      const given = Array.from({ length: loadCount[0] ?? NaN }, (_, load) => [loads[load], loads[loads.length / 2 + load]]);
      expect(given, `seed ${seed}`).toEqual(wanted);
      for (const name of ['where', 'holds', 'usedAt'] as const) expect(await args[name].read(stream), `${name}, seed ${seed}`).toEqual(cache[name]);
      count += wanted.length;
    }
    expect(count).toBeGreaterThan(1000);
  });

  const good = () => {
    const device = open();
    const drawn = randomSequences(new Random(1), { kvHeads: 1, blockTokens: 4, width: 9, slotCount: 2 });
    const sequences = { ...drawn, counts: new Int32Array(2).fill(33), slots: Int32Array.of(1), queryStart: Int32Array.of(0, 30) };
    const placedOnDevice = placeSequences(device, sequences);
    const cache = place(device, { where: new Int32Array(18).fill(-1), holds: new Int32Array(4).fill(-1), usedAt: new Int32Array(4) }, 9);
    return { ...placedOnDevice, ...cache, sourceTable: placedOnDevice.blockTable, rows: 30, blockTokens: 4, sinkBlocks: 1 };
  };

  it.each(spoiltSequences)('refuses a batch that %s', async (_, name, number) => {
    const args = good();
    const stream = args.where.device.createStream();
    placeBlocks(stream, { ...args, [name]: filledWith(args[name], number) });
    await expect(stream.synchronize()).rejects.toThrow(InvalidValueError);
  });

  it('refuses bad input with a typed error', async () => {
    const args = good();
    const { device } = args.where;
    const stream = device.createStream();
    expectRefusals(placeBlocks, stream, args, [
      [{ sinkBlocks: -1 }, InvalidValueError],
      [{ rows: 0.5 }, InvalidValueError],
      [{ blockTokens: 0 }, InvalidValueError],
      [{ firstCached: 2 ** 31 - 4 }, InvalidValueError],
      [{ loads: device.tensor('i32', ['end', 'load'], [2, 8]) }, InvalidValueError],
      [{ usedAt: device.tensor('i32', ['cachedBlock'], [5]) }, ShapeError],
      [{ sourceTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [2, 1, 8]) }, ShapeError],
      [{ holds: args.usedAt }, InvalidValueError],
    ]);
    placeBlocks(stream, args);
    await stream.synchronize();
  });
});
