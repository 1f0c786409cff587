import { DeviceError, DTypeError, InvalidValueError, ShapeError } from '@kv/sparse-core';
import type { Device, Stream } from '@kv/sparse-core';
import { describeOnDevices, Random } from '@kv/sparse-core/testing';
import fc from 'fast-check';
import { expect, it } from 'vitest';

import { selectByDefinition } from '../testing/select-by-definition.js';
import { keptTokens, selectTokens } from './select-tokens.js';
import type { SelectTokensRow } from './select-tokens.js';
import type { SelectTokensOptions } from '../select-options.js';

type Rows = readonly (readonly SelectTokensRow[])[];

/** The kept tokens of every batch entry and kv head. */
async function select(
  device: Device,
  stream: Stream,
  scores: readonly (readonly ArrayLike<number>[])[],
  rows: Rows,
  options: SelectTokensOptions = {},
): Promise<number[][][]> {
  const kvHeads = scores[0]?.length ?? 0;
  const tokens = Math.max(1, ...scores.flat().map((row) => row.length));
  const kept = Math.max(1, ...rows.flat().map(keptTokens));
  const contents = new Float32Array(scores.length * kvHeads * tokens).fill(NaN);
  scores.flat().forEach((row, index) => contents.set(row, index * tokens));
  const poison = new Int32Array(scores.length * kvHeads * kept).fill(-1);
  const shape = [scores.length, kvHeads] as const;
  using scoreTensor = device.tensor('f32', ['batch', 'kvHead', 'token'], [...shape, tokens], contents);
  using indices = device.tensor('i32', ['batch', 'kvHead', 'kept'], [...shape, kept], poison);
  using counts = device.tensor('i32', ['batch', 'kvHead'], shape);
  selectTokens(stream, { ...options, scores: scoreTensor, rows, indices, counts });
  const [chosen, lengths] = [await indices.read(), await counts.read()];
  return scores.map((heads, entry) =>
    heads.map((_, head) => {
      const row = entry * kvHeads + head;
      const count = lengths[row] ?? NaN;
      const whole = [...chosen.subarray(row * kept, (row + 1) * kept)];
      expect(whole.slice(count).every((index) => index === -1)).toBe(true);
      return whole.slice(0, count);
    }),
  );
}

/** Random problems whose scores are small whole numbers, so that ties are many and sums exact. */
const options = fc.record({
  rounds: fc.array(fc.integer({ min: 1, max: 40 }), { minLength: 1, maxLength: 4 }),
  dedup: fc.constantFrom('refill' as const, 'union' as const),
  remainder: fc.constantFrom('fill' as const, 'drop' as const),
  sinkTokens: fc.integer({ min: 0, max: 5 }),
  pooling: fc.option(
    fc.record({
      kind: fc.constantFrom('average' as const, 'max' as const),
      tokens: fc.constantFrom(1, 3, 5, 7, 21),
    }),
    { nil: undefined },
  ),
});
const row = fc.record({
  scores: fc.array(fc.integer({ min: -3, max: 9 }), { minLength: 0, maxLength: 150, size: 'max' }),
  windowTokens: fc.integer({ min: 0, max: 9 }),
  capacity: fc.integer({ min: 0, max: 120 }),
  blockTokens: fc.integer({ min: 1, max: 12 }),
});
type Row = typeof row extends fc.Arbitrary<infer T> ? T : never;
const asked = ({ scores, ...rest }: Row): SelectTokensRow => ({ prefixTokens: scores.length, ...rest });

describeOnDevices('selectTokens', ({ open }) => {
  const device = open();
  const stream = device.createStream();
  /** One row without a window. */
  const one = async (scores: readonly number[], capacity: number, blockTokens: number, more: SelectTokensOptions) => {
    const rows = [[{ prefixTokens: scores.length, windowTokens: 0, capacity, blockTokens }]];
    return (await select(device, stream, [[scores]], rows, more))[0]?.[0];
  };

  const singles = [9, 8, 7, 6, 5, 1, 1.5, 1, 2, 1];
  const pairs = [9, 1, 8, 8, 0, 1, 2, 2, 7, 1, 0, 0, 3, 3, 1, 5, 6, 6, 4, 0];
  it.each([
    { scores: singles, T: 1, k: 4, rounds: [1], kept: [0, 1, 2, 3] },
    { scores: singles, T: 1, k: 4, rounds: [2], kept: [0, 1, 6, 8] },
    { scores: singles, T: 1, k: 4, rounds: [1, 2], kept: [0, 1, 2, 8] },
    { scores: pairs, T: 2, k: 8, rounds: [1], kept: [0, 1, 2, 3, 8, 9, 16, 17] },
    { scores: pairs, T: 2, k: 8, rounds: [4], kept: [2, 3, 8, 9, 12, 13, 16, 17] },
    { scores: pairs, T: 2, k: 8, rounds: [1, 4], kept: [0, 1, 2, 3, 8, 9, 16, 17] },
    { scores: pairs, T: 2, k: 7, rounds: [1], kept: [0, 1, 2, 3, 8, 16, 17] },
    { scores: pairs, T: 2, k: 7, rounds: [1], remainder: 'drop' as const, kept: [0, 1, 2, 3, 16, 17] },
    // The second group has nothing to offer that is better than the first's rest, but gets its share.
    { scores: [9, 8, 0, 0, 0, 0, 0, 0], T: 1, k: 6, rounds: [1, 2], kept: [0, 1, 2, 3, 4, 5] },
    // Both rounds choose 0 and 1; of the union of 2 and 2 tokens 2 are left.
    { scores: [9, 8, 0, 0], T: 1, k: 4, rounds: [1, 1], dedup: 'union' as const, kept: [0, 1, 2, 3] },
    { scores: [9, 8, 1, 0, 0], T: 1, k: 4, rounds: [1, 1], dedup: 'union' as const, remainder: 'drop' as const, kept: [0, 1] },
    // A short last block, 10, beats the full ones by its mean and costs one token: the best single one fills up.
    { scores: [5, 5, 1, 6, 10], T: 2, k: 2, rounds: [1], kept: [3, 4] },
    { scores: [1, 1, 9, 0, 0, 0], T: 4, k: 2, rounds: [1], sinkTokens: 1, kept: [0, 2] },
  ])('keeps $kept of $scores', async ({ scores, T, k, kept, ...more }) => {
    expect(await one(scores, k, T, more)).toEqual(kept);
  });

  it('pools as PyTorch does: outside the prefix there are zeros to the average, and nothing to the maximum', async () => {
    const scores = [4, 0, 3, 3, 0, 0, 0, 4];
    // Sums over three: 4, 7, 6, 6, 3, 0, 4, 4.
    expect(await one(scores, 3, 1, { rounds: [1], pooling: { kind: 'average', tokens: 3 } })).toEqual([1, 2, 3]);
    // Maxima over three: 4, 4, 3, 3, 3, 0, 4, 4.
    expect(await one(scores, 5, 1, { rounds: [1], pooling: { kind: 'max', tokens: 3 } })).toEqual([0, 1, 2, 6, 7]);
    expect(await one([-5, -4, -9], 1, 1, { rounds: [1], pooling: { kind: 'max', tokens: 3 } })).toEqual([0]);
  });

  it('takes NaN for the lowest score, and both zeros for one', async () => {
    expect(await one([NaN, -Infinity, -1, NaN, Infinity], 3, 1, { rounds: [1] })).toEqual([0, 2, 4]);
    expect(await one([-0, 0, -0, 0], 2, 1, { rounds: [1] })).toEqual([0, 1]);
    expect(await one([-0, 0, 9, 9], 3, 2, { rounds: [1] })).toEqual([0, 2, 3]);
  });

  it('keeps what the definition says, alone and in a batch of any neighbours', async () => {
    await fc.assert(
      fc.asyncProperty(fc.array(fc.tuple(row, row), { minLength: 1, maxLength: 3 }), options, async (batch, more) => {
        const scores = batch.map((heads) => heads.map((head) => head.scores));
        const kept = await select(device, stream, scores, batch.map((heads) => heads.map(asked)), more);
        batch.forEach((heads, entry) => {
          heads.forEach((head, index) => {
            expect(kept[entry]?.[index]).toEqual(selectByDefinition(head.scores, asked(head), more));
          });
        });
      }),
      { numRuns: 150 },
    );
  });

  it('keeps exactly the capacity, ascending, without repeats, the window and the sinks among them', async () => {
    await fc.assert(
      fc.asyncProperty(row, options, async (given, more) => {
        const { sinkTokens } = more;
        const rows = [[asked(given)]];
        const { prefixTokens, windowTokens, capacity } = asked(given);
        const kept = (await select(device, stream, [[given.scores]], rows, more))[0]?.[0] ?? [];
        if (more.remainder === 'fill') expect(kept).toHaveLength(keptTokens(asked(given)));
        else expect(kept.length).toBeLessThanOrEqual(keptTokens(asked(given)));
        kept.forEach((token, index) => expect(token).toBeGreaterThan(kept[index - 1] ?? -1));
        const window = Array.from({ length: windowTokens }, (_, index) => prefixTokens + index);
        expect(kept.filter((token) => token >= prefixTokens)).toEqual(window);
        const sinks = Math.max(0, Math.min(sinkTokens, capacity - windowTokens, prefixTokens));
        expect(kept.slice(0, sinks)).toEqual(Array.from({ length: sinks }, (_, index) => index));
      }),
      { numRuns: 100 },
    );
  });

  it('is a stable top-k with single tokens and one group', async () => {
    const random = new Random(31);
    for (let round = 0; round < 60; round++) {
      const scores = Array.from({ length: random.integer(1, 300) }, () => random.integer(0, 20) / 4);
      const k = random.integer(0, scores.length);
      const best = scores.map((score, token) => ({ score, token })).sort((a, b) => b.score - a.score);
      const wanted = best.slice(0, k).map(({ token }) => token);
      expect(await one(scores, k, 1, { rounds: [1] })).toEqual(wanted.sort((a, b) => a - b));
    }
  });

  it('never prefers a token because its score fell', async () => {
    const random = new Random(32);
    const scores = Array.from({ length: 200 }, () => random.integer(0, 50));
    const before = new Set(await one(scores, 50, 1, {}));
    for (let token = 0; token < scores.length; token += 7) {
      const lower = scores.with(token, (scores[token] ?? NaN) - 10);
      if (!before.has(token)) expect(await one(lower, 50, 1, {})).not.toContain(token);
      const higher = scores.with(token, (scores[token] ?? NaN) + 10);
      if (before.has(token)) expect(await one(higher, 50, 1, {})).toContain(token);
    }
  });

  it('grows by adding with one group, and leaves no group empty when each has a share', async () => {
    const random = new Random(33);
    const scores = Array.from({ length: 240 }, () => random.next());
    let smaller: number[] = [];
    for (let k = 8; k < 240; k += 8) {
      const kept = (await one(scores, k, 8, { rounds: [1] })) ?? [];
      expect(kept).toEqual(expect.arrayContaining(smaller));
      smaller = kept;
    }
    const kept = (await one(scores, 64, 8, { rounds: [6] })) ?? [];
    expect(new Set(kept.map((token) => Math.floor(token / 40))).size).toBe(6);
  });

  it('uses all of the capacity at the sizes of the paper', async () => {
    const random = new Random(34);
    const scores = Float32Array.from({ length: 13_000 }, () => random.next());
    for (const capacity of [512, 1024, 2048, 4096]) {
      const rows = [[{ prefixTokens: 13_000, windowTokens: 32, capacity, blockTokens: capacity / 32 }]];
      const [[kept = []] = []] = await select(device, stream, [[scores]], rows);
      expect(kept).toHaveLength(capacity);
    }
  });

  it('refuses what does not fit', () => {
    const scores = device.tensor('f32', ['batch', 'kvHead', 'token'], [1, 1, 8], new Float32Array(8));
    const indices = device.tensor('i32', ['batch', 'kvHead', 'kept'], [1, 1, 4]);
    const counts = device.tensor('i32', ['batch', 'kvHead'], [1, 1]);
    const fine = { prefixTokens: 8, windowTokens: 1, capacity: 4, blockTokens: 1 };
    const good = { scores, indices, counts, rows: [[fine]] };
    selectTokens(stream, good);
    const refuse = (wrong: object, error: new (...args: never[]) => Error) => {
      expect(() => selectTokens(stream, { ...good, ...wrong })).toThrow(error);
    };
    refuse({ scores: device.tensor('f16', ['batch', 'kvHead', 'token'], [1, 1, 8]) }, DTypeError);
    refuse({ indices: device.tensor('i32', ['batch', 'kvHead', 'kept'], [1, 2, 4]) }, ShapeError);
    refuse({ counts: device.tensor('u32', ['batch', 'kvHead'], [1, 1]) }, DTypeError);
    refuse({ counts: open().tensor('i32', ['batch', 'kvHead'], [1, 1]) }, DeviceError);
    refuse({ rows: [] }, ShapeError);
    refuse({ rows: [[fine, fine]] }, ShapeError);
    refuse({ rows: [[{ ...fine, prefixTokens: 9 }]] }, ShapeError);
    refuse({ rows: [[{ ...fine, capacity: 5 }]] }, ShapeError);
    refuse({ rows: [[{ ...fine, blockTokens: 0 }]] }, InvalidValueError);
    refuse({ rows: [[{ ...fine, windowTokens: -1 }]] }, InvalidValueError);
    refuse({ rows: [[{ ...fine, capacity: 2 ** 31 }]] }, InvalidValueError);
    refuse({ rounds: [] }, InvalidValueError);
    refuse({ rounds: [0] }, InvalidValueError);
    refuse({ rounds: new Array(17).fill(1) }, InvalidValueError);
    refuse({ dedup: 'both' }, InvalidValueError);
    refuse({ remainder: 'keep' }, InvalidValueError);
    refuse({ sinkTokens: 1.5 }, InvalidValueError);
    refuse({ pooling: { kind: 'average', tokens: 4 } }, InvalidValueError);
    refuse({ pooling: { kind: 'mean', tokens: 5 } }, InvalidValueError);
  });
});
