import { type Device, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { describeOnDevices, expectRefusals, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { PlanOracle } from '../testing/plan-oracle.js';
import { filledWith, placeSequences, type RandomSequences, randomSequences, spoiltSequences } from '../testing/random-sequences.js';
import { planBlocks, workingSetSteps } from './plan-blocks.js';

interface Sizes {
  readonly sinkBlocks: number;
  readonly recentBlocks: number;
  readonly room: number;
  readonly cached: number;
}

/** What a plan takes besides the batch, with all lists empty and nothing in the cache. */
function emptyCache(device: Device, { slotCount, kvHeads, width, slots }: RandomSequences, { room, cached, ...fixed }: Sizes) {
  const heads = [slotCount, kvHeads] as const;
  const integers = <const A extends readonly string[]>(axes: A, shape: { readonly [Axis in keyof A]: number }, fill = 0) =>
    device.tensor('i32', axes, shape, new Int32Array(shape.reduce((product, extent) => product * extent, 1)).fill(fill));
  return {
    ...fixed,
    chosen: integers(['slot', 'kvHead', 'chosenBlock'], [...heads, room]),
    chosenCounts: integers(['slot', 'kvHead'], heads),
    where: integers(['hostBlock'], [slotCount * kvHeads * width], -1),
    holds: integers(['cachedBlock'], [cached], -1),
    usedAt: integers(['cachedBlock'], [cached]),
    clock: integers(['one'], [1]),
    history: integers(['slot', 'kvHead', 'step', 'chosenBlock'], [...heads, workingSetSteps, room]),
    demand: integers(['slot', 'kvHead', 'count'], [...heads, 4]),
    readTable: integers(['slot', 'kvHead', 'chosenBlock'], [...heads, room], -7),
    readCounts: integers(['slot', 'kvHead'], heads, -7),
    loads: integers(['end', 'load'], [2, slots.length * kvHeads * room]),
    loadCount: integers(['one'], [1], -7),
  };
}

/** Of each 18 steps are planned. */
const caches = Number(process.env.KV_PLANNED_CACHES ?? 6);

describeOnDevices('planBlocks', ({ open }) => {
  it('gives chosen blocks the places of those that were not chosen for longest, step by step', async () => {
    const device = open();
    const stream = device.createStream();
    let read = 0;
    for (let seed = 0; seed < caches; seed++) {
      const random = new Random(seed);
      const [kvHeads, blockTokens, width, slotCount] = [random.integer(1, 3), 4, random.integer(6, 40), 3];
      const drawn = randomSequences(random, { kvHeads, blockTokens, width, slotCount });
      const sequences = { ...drawn, rows: drawn.rows.map((_, entry) => Number(entry === 0 || random.integer(0, 3) > 0)) };
      sequences.rows.forEach((rows, entry) => (sequences.queryStart[entry + 1] = (sequences.queryStart[entry] ?? 0) + rows));
      // A fork: two sequences that share half of their blocks.
      if (seed % 2 === 0) sequences.table.copyWithin(kvHeads * width, 0, (kvHeads * width) / 2);
      const fixed = { sinkBlocks: random.integer(0, 2), recentBlocks: random.integer(1, 3) };
      const room = fixed.sinkBlocks + fixed.recentBlocks + random.integer(1, 9);
      const cached = sequences.slots.length * kvHeads * room + random.integer(0, 8);
      const args = { ...placeSequences(device, sequences), ...emptyCache(device, sequences, { ...fixed, room, cached }), blockTokens, rows: slotCount };
      const firstCached = slotCount * kvHeads * (fixed.sinkBlocks + fixed.recentBlocks);
      const oracle = new PlanOracle({ ...fixed, heads: slotCount * kvHeads, blockTokens, cached });
      for (let step = 0; step < 18; step++) {
        const forgotten = random.integer(0, args.where.shape[0] - 1);
        stream.write(args.where.slice('hostBlock', forgotten, forgotten + 1), Int32Array.of(-1));
        oracle.forget(forgotten);
        const brought = random.integer(0, args.where.shape[0] - 1);
        const place = oracle.place(brought);
        if (place !== undefined) {
          stream.write(args.where.slice('hostBlock', brought, brought + 1), Int32Array.of(firstCached + place));
          stream.write(args.holds.slice('cachedBlock', place, place + 1), Int32Array.of(brought));
          stream.write(args.usedAt.slice('cachedBlock', place, place + 1), Int32Array.of(0));
        }
        const chosen = new Int32Array(slotCount * kvHeads * room);
        const chosenCounts = new Int32Array(slotCount * kvHeads);
        const lists = Array.from(sequences.slots, (slot, entry) => ({ slot, rows: sequences.rows[entry] }))
          .filter(({ rows }) => rows === 1)
          .flatMap(({ slot }) => Array.from({ length: kvHeads }, (_, head) => slot * kvHeads + head))
          .map((head) => {
            const tokens = sequences.counts[head] ?? NaN;
            const blocks = Math.ceil(tokens / blockTokens);
            const others = Array.from(random.permutation(blocks - 1)).slice(0, random.integer(0, room - 1));
            const own = [...others, blocks - 1].sort((one, other) => one - other);
            chosen.set(own, head * room);
            chosenCounts[head] = own.length;
            return { head, chosen: own, tokens, hostBlocks: sequences.table.subarray(head * width, (head + 1) * width) };
          });
        stream.write(args.chosen, chosen);
        stream.write(args.chosenCounts, chosenCounts);
        planBlocks(stream, args);
        const wanted = oracle.plan(lists);
        read += lists.reduce((sum, list) => sum + list.chosen.length, 0);
        const [count = NaN] = await args.loadCount.read(stream);
        const loads = await args.loads.read(stream);
        const given = Array.from({ length: count }, (_, load) => [loads[load], loads[loads.length / 2 + load]]);
        expect(given, `loads of step ${step}`).toEqual(wanted.loads);
        const [readTable, readCounts, demand] = [await args.readTable.read(stream), await args.readCounts.read(stream), await args.demand.read(stream)];
        for (const { head, places, tokens } of wanted.tables) {
          expect(Array.from(readTable.subarray(head * room, head * room + places.length))).toEqual(places);
          expect(readCounts[head]).toBe(tokens);
          expect(Array.from(demand.subarray(head * 4, head * 4 + 4))).toEqual(oracle.demand(head));
        }
      }
    }
    console.log(`${read} blocks were read of ${caches} caches`);
  });

  const good = () => {
    const device = open();
    const drawn = randomSequences(new Random(1), { kvHeads: 1, blockTokens: 4, width: 9, slotCount: 2 });
    const sequences = { ...drawn, counts: new Int32Array(2).fill(33), slots: Int32Array.of(1), queryStart: Int32Array.of(0, 1) };
    const cache = emptyCache(device, sequences, { sinkBlocks: 1, recentBlocks: 2, room: 7, cached: 4 });
    const chosen = device.tensor('i32', ['slot', 'kvHead', 'chosenBlock'], [2, 1, 7], Int32Array.of(0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 7, 8));
    const chosenCounts = device.tensor('i32', ['slot', 'kvHead'], [2, 1], Int32Array.of(0, 7));
    return { ...placeSequences(device, sequences), ...cache, chosen, chosenCounts, blockTokens: 4, rows: 1 };
  };

  it.each([
    ...spoiltSequences,
    ['has a list longer than its room', 'chosenCounts', 8],
    ['has a list of fewer than no blocks', 'chosenCounts', -1],
    ['chooses a block twice', 'chosen', 3],
    ['chooses blocks that its sequence does not have', 'chosen', 9],
  ] as const)('refuses a batch that %s', async (_, name, number) => {
    const args = good();
    const stream = args.chosen.device.createStream();
    planBlocks(stream, { ...args, [name]: filledWith(args[name], number) });
    await expect(stream.synchronize()).rejects.toThrow(InvalidValueError);
  });

  it('refuses a step that chooses more than the cache has', async () => {
    const args = good();
    const { device } = args.chosen;
    const stream = device.createStream();
    const small = { holds: args.holds.slice('cachedBlock', 0, 3), usedAt: args.usedAt.slice('cachedBlock', 0, 3) };
    planBlocks(stream, { ...args, ...small });
    await expect(stream.synchronize()).rejects.toThrow('more blocks than the cache has');
    const next = device.createStream();
    planBlocks(next, args);
    await next.synchronize();
  });

  it('refuses bad input with a typed error', async () => {
    const args = good();
    const { device } = args.chosen;
    const stream = device.createStream();
    expectRefusals(planBlocks, stream, args, [
      [{ sinkBlocks: 6 }, InvalidValueError],
      [{ recentBlocks: 0 }, InvalidValueError],
      [{ rows: 0.5 }, InvalidValueError],
      [{ loads: device.tensor('i32', ['end', 'load'], [2, 6]) }, InvalidValueError],
      [{ loads: device.tensor('i32', ['end', 'load'], [1, 7]) }, ShapeError],
      [{ usedAt: device.tensor('i32', ['cachedBlock'], [5]) }, ShapeError],
      [{ readTable: args.chosen }, InvalidValueError],
    ]);
    planBlocks(stream, args);
    await stream.synchronize();
  });
});
