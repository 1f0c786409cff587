import { InvalidValueError, ropeDescription, ShapeError } from '@kv/sparse-core';
import type { FloatDType, RopeConvention, RopeDescription } from '@kv/sparse-core';
import { describeOnDevices, Random, randomCache } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import { decomposeByDefinition, logAttention } from '../testing/decompose-by-definition.js';
import type { DecompositionOptions } from '../testing/decompose-by-definition.js';
import { decomposeSteps, rounded } from '../testing/decompose-on-device.js';
import type { DecomposedSteps, DeviceParts, HeadRows } from '../testing/decompose-on-device.js';
import { syntheticAttention } from '../testing/synthetic-attention.js';
import { decomposeAttention, decompositionStateBytes } from './decompose-attention.js';

const options: DecompositionOptions = {
  sinkTokens: 4,
  diagonalTokens: 16,
  samples: 2000,
  seed: 1,
  ridge: 1e-6,
  formulas: 'corrected',
};
const parts = ['slash', 'vertical', 'horizontal'] as const;

interface Case {
  readonly rope: RopeDescription;
  readonly dim: number;
  readonly group: number;
  readonly kvHeads: number;
  readonly tokens: number;
  readonly dtype: FloatDType;
}

function ropeOf(convention: RopeConvention, headDim: number, rotaryDim = headDim): RopeDescription {
  return { ...ropeDescription({ theta: 1e4, headDim, rotaryDim, convention }), attentionScale: 1.2 };
}

const cases: readonly Case[] = [
  { rope: ropeOf('halfSplit', 64), dim: 64, group: 4, kvHeads: 1, tokens: 300, dtype: 'f16' },
  { rope: ropeOf('interleaved', 48, 24), dim: 48, group: 1, kvHeads: 3, tokens: 261, dtype: 'f32' },
  { rope: ropeOf('halfSplit', 20, 8), dim: 20, group: 3, kvHeads: 2, tokens: 200, dtype: 'bf16' },
];
const small: Case = { rope: ropeOf('halfSplit', 32), dim: 32, group: 2, kvHeads: 2, tokens: 150, dtype: 'f32' };

/** Rows of no structure. */
function randomRows({ dim, group, kvHeads, tokens, dtype }: Case, seed = 1): HeadRows {
  const random = new Random(seed);
  const heads = (count: number) =>
    Array.from({ length: count }, () =>
      Array.from({ length: tokens }, () => Float64Array.from({ length: dim }, () => random.normal() + 0.3)),
    );
  return rounded(dtype, { queries: heads(kvHeads * group), keys: heads(kvHeads) });
}

/** Infinite where one is NaN and the other is not. */
function largestDifference(a: ArrayLike<number>, b: ArrayLike<number>): number {
  const apart = Array.from(a, (x, index) => (Object.is(x, b[index]) ? 0 : Math.abs(x - (b[index] ?? NaN))));
  return a.length === b.length ? apart.reduce((most, x) => (x <= most ? most : Number.isNaN(x) ? Infinity : x), 0) : Infinity;
}

describeOnDevices('decomposeAttention', ({ name, open }) => {
  // Of f32 sums: least squares that are nearly of lower rank carry the roundings of keys and means into the slash part.
  const tolerance = name === 'cuda' ? 2e-3 : 1e-4;

  const onDevice = (given: Case, rows: HeadRows, steps: readonly number[], changes: Partial<DecomposedSteps> = {}, threads = 2) => {
    const device = open(threads);
    const { dtype, rope, dim } = given;
    return decomposeSteps(device, device.createStream(), rows, { ...options, dtype, rope, scale: dim ** -0.5, steps, ...changes });
  };
  const byDefinition = (given: Case, rows: HeadRows, steps: readonly number[], changes: Partial<DecompositionOptions> = {}) =>
    rows.queries.map((queries, head) => {
      const keys = rows.keys[Math.floor(head / given.group)] ?? [];
      const problem = { queries, keys, rope: given.rope, scale: given.dim ** -0.5 };
      return decomposeByDefinition(problem, steps, { ...options, ...changes });
    });
  const expectAlike = (given: DeviceParts, wanted: readonly Record<(typeof parts)[number], ArrayLike<number>>[], most: number) => {
    wanted.forEach((head, index) => {
      for (const part of parts) {
        expect(largestDifference(given[part][index] ?? [], head[part]), `${part} of head ${index}`).toBeLessThanOrEqual(most);
      }
    });
  };
  const asHeads = (given: DeviceParts) =>
    given.slash.map((slash, head) => ({ slash, vertical: given.vertical[head] ?? [], horizontal: given.horizontal[head] ?? [] }));

  it.each(cases)('is Algorithm 1 of $tokens tokens in $dtype, heads of $dim', async (given) => {
    const rows = randomRows(given);
    for (const steps of [[given.tokens], [10, 64, 97, given.tokens]]) {
      expectAlike(await onDevice(given, rows, steps), byDefinition(given, rows, steps), tolerance);
    }
  });

  it('is so across runs of rows, and of a prompt without an interior', async () => {
    const long = { ...small, tokens: 1100, kvHeads: 1, group: 1 };
    const rows = randomRows(long);
    expectAlike(await onDevice(long, rows, [1100]), byDefinition(long, rows, [1100]), tolerance);
    for (const tokens of [1, 3, 20]) {
      const few = { ...small, tokens };
      expectAlike(await onDevice(few, randomRows(few), [tokens]), byDefinition(few, randomRows(few), [tokens]), tolerance);
    }
  });

  it('keeps the letter of the paper where that is asked for', async () => {
    const rows = randomRows(small);
    const changes = { formulas: 'paper' } as const;
    expectAlike(await onDevice(small, rows, [150], changes), byDefinition(small, rows, [150], changes), tolerance);
  });

  it.each(['halfSplit', 'interleaved'] as const)('finds the parts of a synthetic attention map, %s', async (convention) => {
    const rope = ropeOf(convention, 32, 16);
    const problem = syntheticAttention(new Random(7), rope, { tokens: 400, dim: 32, sinkTokens: options.sinkTokens });
    const { queries, keys } = rounded('f32', { queries: [problem.queries], keys: [problem.keys] });
    const given: Case = { rope, dim: 32, group: 1, kvHeads: 1, tokens: 400, dtype: 'f32' };
    for (const steps of [[400], [128, 256, 400]]) {
      const found = await onDevice(given, { queries, keys }, steps, { samples: 3000 });
      const [slash, vertical, horizontal] = parts.map((part) => found[part][0] ?? new Float32Array()) as [
        Float32Array,
        Float32Array,
        Float32Array,
      ];
      for (const row of [290, 333, 399]) {
        const logarithms = logAttention({ ...problem, queries: queries[0] ?? [], keys: keys[0] ?? [] }, row);
        const h = horizontal.at(row - 400) ?? NaN;
        const errors = logarithms
          .map((x, key) => (slash[row - key] ?? NaN) + (vertical[key] ?? NaN) + h - x)
          .slice(options.sinkTokens, row - options.diagonalTokens + 1);
        // A row's denominator is an estimate, but for the last one's; what is in common to all keys is its error.
        expect(Math.max(...errors) - Math.min(...errors)).toBeLessThan(tolerance);
        if (row === 399) expect(Math.max(...errors.map(Math.abs))).toBeLessThan(tolerance);
      }
    }
  });

  it('has for query heads that share keys what each has by itself', async () => {
    const rows = randomRows(small);
    const keys = rows.queries.map((_, head) => rows.keys[Math.floor(head / small.group)] ?? []);
    const alone = await onDevice({ ...small, group: 1, kvHeads: 4 }, { ...rows, keys }, [64, 150]);
    expectAlike(await onDevice(small, rows, [64, 150]), asHeads(alone), tolerance);
  });

  it('does not depend on the number of threads', async () => {
    const long = { ...small, tokens: 1100 };
    const rows = randomRows(long);
    expectAlike(await onDevice(long, rows, [600, 1100], {}, 1), asHeads(await onDevice(long, rows, [600, 1100], {}, 3)), 0);
  });

  it('reads keys that came without queries from the cache', async () => {
    // Tokens of an answer between two prompts are appended and never decomposed: only their samples are missing.
    const rows = randomRows(small);
    const steps = [60, 100, 150];
    expectAlike(await onDevice(small, rows, steps, { skipped: [1] }), byDefinition(small, rows, steps, { skipped: [1] }), tolerance);
  });

  it('shows what is NaN in its own row only, and in the parts where no keys are known', async () => {
    const rows = randomRows(small);
    const withNan = (heads: HeadRows['keys'], head: number, token: number) =>
      heads.map((of, h) => of.map((row, t) => (h === head && t === token ? row.map(() => NaN) : row)));
    const query = await onDevice(small, { ...rows, queries: withNan(rows.queries, 1, 90) }, [150]);
    query.horizontal.forEach((horizontal, head) => {
      horizontal.forEach((h, row) => expect(Number.isNaN(h), `row ${row} of head ${head}`).toBe(head === 1 && row === 90));
    });
    expect([...query.slash, ...query.vertical].every((part) => part.every(Number.isFinite))).toBe(true);
    const key = await onDevice(small, { ...rows, keys: withNan(rows.keys, 1, 30) }, [150]);
    expect(key.vertical.map((vertical) => vertical.every(Number.isNaN))).toEqual([false, false, true, true]);
    expect(key.horizontal.map((horizontal) => Number.isNaN(horizontal[149]))).toEqual([false, false, true, true]);
  });

  it('of constant keys is NaN or finite, and never fails', async () => {
    const rows = randomRows(small);
    const keys = rows.keys.map((of) => of.map(() => new Float64Array(small.dim)));
    const { slash } = await onDevice(small, { ...rows, keys }, [150]);
    expect(slash).toHaveLength(4);
  });

  it('refuses counts and tables that are not those of the tensors, and options out of range', async () => {
    const device = open();
    const stream = device.createStream();
    const sizes = { rows: [8], keyCounts: [[40, 40]], kvHeads: 2, group: 2, dim: 16, blockTokens: 64, cacheDType: 'f32' } as const;
    const cache = randomCache(device, new Random(3), sizes);
    const bytes = decompositionStateBytes({ queryHeads: 4, kvHeads: 2, headDim: 16, pairs: 8 });
    const call = (tokens: number, rows: number, changes: object = {}, on = stream) => {
      const args = {
        query: device.tensor('f32', ['token', 'queryHead', 'dim'], [8, 4, 16], new Float32Array(512)),
        blocks: cache.blocks,
        slots: device.tensor('i32', ['batch'], [1], cache.slots),
        queryStart: device.tensor('i32', ['boundary'], [2], cache.queryStart),
        inverseFrequencies: device.tensor('f32', ['pair'], [8], new Float32Array(8).fill(0.1)),
        convention: 'halfSplit' as const,
        scale: 1,
        state: device.tensor('u8', ['byte'], [bytes]),
        seenTokens: 0,
        slash: device.tensor('f32', ['queryHead', 'lag'], [4, tokens]),
        vertical: device.tensor('f32', ['queryHead', 'key'], [4, tokens]),
        horizontal: device.tensor('f32', ['queryHead', 'row'], [4, rows]),
      };
      decomposeAttention(on, { ...args, ...changes });
    };
    call(40, 8);
    await stream.synchronize();
    for (const [name, wrong] of Object.entries({
      samples: [0, 0.5, 2 ** 21, NaN],
      ridge: [0, -1, 2, NaN],
      seed: [-1, 0.5],
      sinkTokens: [-1, 1025],
      diagonalTokens: [0, 4097],
      seenTokens: [-1, 33],
      scale: [NaN, Infinity],
      attentionScale: [0, NaN],
      formulas: ['ours'],
      convention: ['none'],
    })) {
      for (const value of wrong) expect(() => call(40, 8, { [name]: value }), `${name} ${value}`).toThrow(InvalidValueError);
    }
    expect(() => call(40, 41)).toThrow(InvalidValueError);
    expect(() => call(40, 8, { state: device.tensor('u8', ['byte'], [8]) })).toThrow(ShapeError);
    expect(() => call(40, 8, { slots: device.tensor('i32', ['batch'], [2]), queryStart: device.tensor('i32', ['boundary'], [3]) })).toThrow(
      ShapeError,
    );
    for (const [tokens, rows] of [[41, 8], [40, 7]] as const) {
      const other = device.createStream();
      call(tokens, rows, {}, other);
      await expect(other.synchronize()).rejects.toThrow(InvalidValueError);
    }
  });
});
