import { halo, hbw, snapKv, streaming } from '@kv/hbw-select';
import { hieraSparseStore } from '@kv/hierasparse';
import { Model } from '@kv/model';
import { createDevice, densePagedStore, devices, kvPolicy } from '@kv/sparse-core';
import type { InstructionSet } from '@kv/sparse-core';
import { Random } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import { noting, peek, randomCourse, readAlong } from './testing/fresh-runs.js';
import type { Moment } from './testing/fresh-runs.js';
import { needleModel } from './testing/run-kv.js';

/** Of each policy. */
const tries = Number(process.env.KV_FRESH_RUNS ?? 2);
const answer = [17, 99, 1234, 500];
const sinkTokens = 64;
const localWindow = 64;

/**
 * By rounding alone, as a share of the largest logit. Sums of f32 in another order moved 240 prompts by 4e-6 at most;
 * with a cache of f16, whose rows then round apart, by 2.8e-3. Tensor cores cut off bits that f32 additions round.
 * Activations and a cache of bf16 round eight times as coarsely as f16; they moved 24 prompts by 2.1e-2.
 */
const roundings = { cpu: { f32: 2e-5, f16: 4e-3, bf16: 3.2e-2 }, cuda: { f32: 2e-4, f16: 4e-3, bf16: 3.2e-2 } } as const;

interface Comparison {
  /** Default: f32. */
  readonly activations?: 'f32' | 'bf16';
  /** Of the cache, which has that of activations of 16 bits. */
  readonly dtype?: 'f32' | 'f16';
  /** Where the policy notes what it sees. */
  readonly moments?: Moment[];
  readonly compare?: Compare;
  readonly seed: number;
  /** Default: the same, and the prompt is cut. */
  readonly instructionSet?: InstructionSet | undefined;
}

/** Says how many choices of a layer differ. */
type Compare = (one: Moment, other: Moment) => number;

describe.each(['cpu', 'cuda'] as const)('a prompt in chunks and beside others on %s', (kind) => {
  /**
   * Reads random prompts twice, at once and cut, or with another instruction set. Logits differ by no more than rounding
   * where no choice does.
   * @returns how many choices differ
   */
  async function compareRuns(
    name: string,
    policy: Parameters<typeof kvPolicy>[0],
    { activations = 'f32', dtype = 'f16', moments = [], compare = () => 0, seed, instructionSet }: Comparison,
  ): Promise<number> {
    const options = { sequences: 2, contextTokens: 640, activations, policy: kvPolicy(policy) } as const;
    using model = await Model.open(needleModel, { device: createDevice({ kind, threads: 2 }) });
    using runner = model.createRunner(options);
    using otherModel = await Model.open(needleModel, { device: createDevice({ threads: 2, instructionSet }) });
    using otherRunner = otherModel.createRunner(options);
    const rounded = activations === 'bf16' ? activations : dtype;
    const { vocabularySize } = model.config;
    const random = new Random(seed);
    const found: { moved: number; difference: number }[] = [];
    for (let run = 0; run < tries; run++) {
      const prompt = Int32Array.from({ length: random.integer(200, 500) }, () => random.integer(3, vocabularySize - 1));
      const atOnce = { chunks: [prompt.length], neighbour: new Int32Array() };
      const course = randomCourse(random, prompt.length, vocabularySize);
      const whole = await readAlong(runner, prompt, answer, atOnce);
      const fresh = moments.splice(0);
      const cut =
        instructionSet === undefined
          ? await readAlong(runner, prompt, answer, course)
          : await readAlong(otherRunner, prompt, answer, atOnce);
      const again = moments.splice(0);
      const logits = whole.flatMap((row, index) => Array.from(row, (logit, id) => [logit, cut[index]?.[id] ?? NaN] as const));
      const largest = logits.reduce((most, [logit]) => Math.max(most, Math.abs(logit)), 0);
      const difference = logits.reduce((most, [one, other]) => Math.max(most, Math.abs(one - other)), 0) / largest;
      const moved = fresh.reduce((sum, one, layer) => sum + compare(one, again[layer] ?? one), 0);
      expect(again).toHaveLength(fresh.length);
      if (moved === 0) expect(difference).toBeLessThan(roundings[kind][rounded]);
      found.push({ moved, difference });
    }
    const total = found.reduce((sum, { moved }) => sum + moved, 0);
    if (process.env.KV_FRESH_RUNS) {
      const most = (of: typeof found) => Math.max(0, ...of.map(({ difference }) => difference));
      const [same, other] = [found.filter(({ moved }) => moved === 0), found.filter(({ moved }) => moved > 0)];
      console.log(name, rounded, `${same.length} alike: ${most(same)}; ${total} choices in ${other.length} others: ${most(other)}`);
    }
    return total;
  }
  const onDevice = it.skipIf(!devices().includes(kind));
  const cases = (['f32', 'f16'] as const).map((dtype) => [dtype, densePagedStore({ dtype })] as const);

  onDevice.each(cases)('differs by rounding alone where nothing is chosen, %s', async (dtype, store) => {
    expect(await compareRuns('dense', { store }, { dtype, seed: 1 })).toBe(0);
    expect(await compareRuns('streaming', { store, select: streaming({ keepRatio: 0.25 }) }, { dtype, seed: 2 })).toBe(0);
  });

  /** CUDA attends over sparse blocks with rows of their dtype. */
  const onSparseBlocks = onDevice.each(kind === 'cpu' ? (['f32', 'bf16'] as const) : (['bf16'] as const));

  onSparseBlocks('differs by rounding alone where a fixed mask prunes, %s', async (activations) => {
    // Two of four neighbours: dims of keys, tokens of values.
    const elementMask = ({ kvHeads, headDim }: { kvHeads: number; headDim: number }, operand: 'keys' | 'values') =>
      Uint8Array.from({ length: kvHeads * 64 * headDim }, (_, i) =>
        (operand === 'keys' ? i % 4 : Math.floor(i / headDim) % 4) < 2 ? 1 : 0,
      );
    const store = hieraSparseStore({ keys: 1, values: 1, sinkTokens, localWindow, elementMask });
    expect(await compareRuns('fixed mask', { store }, { activations, seed: 3 })).toBe(0);
  });

  onSparseBlocks('prunes other elements only where two magnitudes are a rounding apart, %s', async (activations) => {
    let [all, widest] = [0, 0];
    const store = hieraSparseStore({ keys: 1, values: 1, sinkTokens, localWindow });
    const moments: Moment[] = [];
    const compare: Compare = (one, other) => {
      let moved = 0;
      for (const operand of ['keys', 'values'] as const) {
        one[operand].forEach((numbers, head) => {
          const again = other[operand][head] ?? new Float64Array();
          const dim = 64;
          const [step, rows] = operand === 'keys' ? [1, 1] : [dim, 4];
          for (let row = sinkTokens * dim; row < numbers.length - 2 * localWindow * dim; row += rows * dim) {
            const largest = Math.max(...numbers.subarray(row, row + rows * dim).map(Math.abs));
            for (let first = row; first < row + dim; first += operand === 'keys' ? 4 : 1) {
              const [kept, cut] = [byMagnitude(numbers, first, step), byMagnitude(again, first, step)];
              all += 1;
              if (new Set([...kept.slice(0, 2), ...cut.slice(0, 2)]).size === 2) continue;
              moved += 1;
              const at = (index = NaN) => Math.abs(numbers[first + index * step] ?? NaN);
              widest = Math.max(widest, (at(kept[1]) - at(kept[2])) / largest);
            }
          }
        });
      }
      return moved;
    };
    const moved = await compareRuns('magnitudes', { store, select: peek(moments) }, { activations, moments, compare, seed: 4 });
    if (process.env.KV_FRESH_RUNS) console.log({ moved, all, widest });
    expect(all).toBeGreaterThan(10_000);
    // Elements of a row of f16 round by 2^-11 of its largest one at most, and come from rows that differ by as much.
    // Activations of bf16 round before that too, once behind the projection and once behind RoPE: by 2^-8, twice as often.
    expect(widest).toBeLessThan(activations === 'bf16' ? 8 * 2 ** -8 : 4 * 2 ** -11);
  });

  const selectors = [
    { name: 'hbw', pool: 1, seed: 5, selector: hbw({ keepRatio: 0.25, blockTokens: 1, rounds: [1] }) },
    { name: 'snapkv', pool: 5, seed: 6, selector: snapKv({ keepRatio: 0.25 }) },
    { name: 'halo', pool: 25, seed: 7, selector: halo({ keepRatio: 0.25 }) },
  ];
  async function compareSelections({ name, pool, seed, selector }: (typeof selectors)[number], dtype: 'f32' | 'f16', instructionSet?: InstructionSet) {
    let [all, widest] = [0, 0];
    const moments: Moment[] = [];
    const compare: Compare = (one, other) => {
      let moved = 0;
      one.kept.forEach((kept, head) => {
        const again = other.kept[head] ?? new Set();
        all += kept.size;
        const [lost, won] = [[...kept].filter((id) => !again.has(id)), [...again].filter((id) => !kept.has(id))];
        expect(lost).toHaveLength(won.length);
        moved += lost.length;
        const score = (token: number) => pooled(one.scores[head] ?? new Float32Array(), token, pool, name === 'halo');
        // In the fresh run every token that was kept is better than every other.
        for (const token of lost) for (const better of won) widest = Math.max(widest, 1 - score(better) / score(token));
      });
      return moved;
    };
    const policy = { store: densePagedStore({ dtype }), select: noting(selector, moments) };
    const moved = await compareRuns(name, policy, { dtype, moments, compare, seed, instructionSet });
    if (process.env.KV_FRESH_RUNS) console.log(name, dtype, instructionSet ?? 'cut', { moved, all, widest });
    expect(all).toBeGreaterThan(1000);
    // A row of f16 rounds by 2^-11 of itself, and products of these prompts are up to about 100.
    expect(widest).toBeLessThan(dtype === 'f16' ? 5e-2 : 2e-4);
  }
  const chosen = selectors.flatMap((each) => (['f32', 'f16'] as const).map((dtype) => ({ ...each, dtype })));
  onDevice.each(chosen)('keeps other tokens only where two scores are a rounding apart, $name $dtype', async ({ dtype, ...each }) => {
    await compareSelections(each, dtype);
  });

  const onTheCpu = it.skipIf(kind !== 'cpu');
  onTheCpu.each(chosen)('so it does with other vector instructions, $name $dtype', async ({ dtype, ...each }) => {
    await compareSelections(each, dtype, 'baseline');
  });
});

/** The places 0 to 3 of four neighbours, those of the largest magnitude first. */
function byMagnitude(numbers: Float64Array, first: number, step: number): number[] {
  const magnitude = (index: number) => Math.abs(numbers[first + index * step] ?? NaN);
  return [0, 1, 2, 3].sort((a, b) => magnitude(b) - magnitude(a) || a - b);
}

function pooled(scores: Float32Array, token: number, pool: number, maximum: boolean): number {
  const reach = (pool - 1) / 2;
  const near = scores.subarray(Math.max(0, token - reach), token + reach + 1);
  return maximum ? Math.max(...near) : near.reduce((sum, score) => sum + score, 0);
}
