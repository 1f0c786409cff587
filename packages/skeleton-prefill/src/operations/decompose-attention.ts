import { ShapeError } from '@kv/sparse-core';
import type { FloatDType, PagedRows, RopeConvention, Stream, TensorHandle } from '@kv/sparse-core';
import { expectHeads, expectObject, expectThat, floats, isFinite32, loadAddon, operation, pagedRowRules } from '@kv/sparse-core/native';

import { exactTokens, type ExactTokens, isWhole } from '../exact-tokens.js';

/** In the order of `DecompositionFormulas` in the operation's header. */
const decompositionFormulas = ['corrected', 'paper'] as const;

/** `paper` keeps the letter of lines 3, 4, 16 and 18 of Algorithm 1, which `corrected` puts right. */
export type DecompositionFormulas = (typeof decompositionFormulas)[number];

export interface DecomposeAttentionOptions extends ExactTokens {
  /**
   * Elements that the least squares see of a sequence in one step. Several steps see more together, and are as certain.
   * From 1 to 2^20; default: 80 times the head's dims.
   */
  readonly samples?: number | undefined;
  /** Of the samples, which are the same for all heads. A whole number from 0 to 2^53 - 1; default: 0. */
  readonly seed?: number | undefined;
  /** ε of line 13, where λ is ε‖A‖/2. More than 0, at most 1; default: 1e-6. */
  readonly ridge?: number | undefined;
  /** Default: `corrected`. */
  readonly formulas?: DecompositionFormulas | undefined;
}

/** The batch has one entry, whose rows are the last of its sequence; every kv head holds all of its keys. */
export interface DecomposeAttentionArguments extends PagedRows, DecomposeAttentionOptions {
  /** `[token, queryHead, dim]`, after RoPE; query heads are a multiple of the cache's kv heads. */
  readonly query: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** Products are multiplied by this before the softmax; usually `1 / sqrt(headDim)`. */
  readonly scale: number;
  /** f32 `[pair]`, contiguous, radians a position; `2 * pair <= dim`. */
  readonly inverseFrequencies: TensorHandle<'f32', readonly ['pair']>;
  readonly convention: RopeConvention;
  /** What every cosine and sine was multiplied by; not 0. Default: 1. */
  readonly attentionScale?: number | undefined;
  /**
   * u8 `[byte]`, contiguous, as many as `decompositionStateBytes` says: what a call leaves for those on the sequence's
   * later rows. While nothing has been seen it may hold anything.
   */
  readonly state: TensorHandle<'u8', readonly ['byte']>;
  /** How many tokens the sequence had at the end of the call that left the state; 0 for none. */
  readonly seenTokens: number;
  /** f32 `[queryHead, lag]`, contiguous, as many lags as keys: s, of a key so many tokens before its query. */
  readonly slash: TensorHandle<'f32', readonly ['queryHead', 'lag']>;
  /** f32 `[queryHead, key]`, contiguous: v. */
  readonly vertical: TensorHandle<'f32', readonly ['queryHead', 'key']>;
  /** f32 `[queryHead, row]`, contiguous: h, of the entry's rows. */
  readonly horizontal: TensorHandle<'f32', readonly ['queryHead', 'row']>;
}

interface DecompositionSizes {
  readonly queryHeads: number;
  readonly kvHeads: number;
  readonly headDim: number;
  /** Frequencies of the rotation. */
  readonly pairs: number;
}

/**
 * How many bytes the state of one sequence takes.
 * @throws InvalidValueError unless all are whole numbers from 1 on
 */
export function decompositionStateBytes(sizes: DecompositionSizes): number {
  expectObject('decompositionStateBytes', 'sizes', sizes);
  for (const name of ['queryHeads', 'kvHeads', 'headDim', 'pairs'] as const) {
    expectThat('decompositionStateBytes', name, sizes[name], isWhole(sizes[name], 1, 2 ** 31 - 1), 'a whole number from 1 on');
  }
  return stateBytes(sizes);
}

function stateBytes({ queryHeads, kvHeads, headDim, pairs }: DecompositionSizes): number {
  const coefficients = 2 * pairs + headDim;
  // As `DecompositionState` of the operation's header lays it out.
  return 8 * (kvHeads * (3 * headDim + headDim ** 2 + coefficients ** 2) + queryHeads * coefficients);
}

const enqueue = operation(
  'decomposeAttention',
  [
    { name: 'query', dtype: floats, shape: ['token', 'queryHead', 'dim'], layout: 'rows' },
    { name: 'inverseFrequencies', dtype: ['f32'], shape: ['pair'], layout: 'contiguous' },
    { name: 'state', dtype: ['u8'], shape: ['byte'], layout: 'contiguous' },
    { name: 'slash', dtype: ['f32'], shape: ['queryHead', 'key'], layout: 'contiguous' },
    { name: 'vertical', dtype: ['f32'], shape: ['queryHead', 'key'], layout: 'contiguous' },
    { name: 'horizontal', dtype: ['f32'], shape: ['queryHead', 'row'], layout: 'contiguous' },
    ...pagedRowRules,
  ],
  ['state', 'slash', 'vertical', 'horizontal'],
);

/**
 * Estimates the attention of the last rows of a sequence (Sparse Skeleton, Algorithm 1, Eq. 2 to 11):
 * `ln softmax_j(scale * query[i, h] · key[j]) ≈ slash[h, i - j] + vertical[h, j] + horizontal[h, i]` where key j is neither
 * a sink nor within the diagonal of row i. Time and memory grow with the number of tokens, not with its square. Sums are
 * f32 or f64, the least squares f64. A prompt may come in steps, each with the state that the one before left.
 *
 * A head whose least squares have no finite solution gets slash and vertical parts of NaN, which select every block; a
 * row of NaN a horizontal part of NaN.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError; tables that lead outside, and counts of
 * rows or keys that are not the tensors', reject the stream's next wait with an InvalidValueError
 */
export function decomposeAttention(stream: Stream, args: DecomposeAttentionArguments): void {
  enqueue(stream, args, (natives, [query, { shape: frequencies }, state, slash, , horizontal, , , , keyCounts, slots]) => {
    const kvHeads = keyCounts.shape[1];
    expectHeads('decomposeAttention', query, kvHeads);
    const [[, queryHeads, headDim], [pairs], [, tokens], [, rows]] = [query.shape, frequencies, slash.shape, horizontal.shape];
    expectExtent('slots', slots.shape[0], 1, 'one batch entry is decomposed at a time');
    expectExtent('state', state.shape[0], stateBytes({ queryHeads, kvHeads, headDim, pairs }), 'bytes of these heads');
    const { scale, convention, attentionScale = 1, seenTokens } = args;
    const { sinkTokens, diagonalTokens, samples, seed, ridge, formulas } = decomposeOptions('decomposeAttention', args, headDim);
    expect('inverseFrequencies', pairs, pairs >= 1 && 2 * pairs <= headDim, `1 to dim / 2 (${headDim / 2}) of them`);
    expect('horizontal', rows, rows >= 1 && rows <= tokens, `of 1 to ${tokens} rows, as many as there are keys at most`);
    expect('scale', scale, isFinite32(scale), 'a finite f32');
    expect('convention', convention, ['halfSplit', 'interleaved'].includes(convention), 'halfSplit or interleaved');
    expect('attentionScale', attentionScale, isFinite32(attentionScale) && attentionScale !== 0, 'a finite f32, and not 0');
    expect('seenTokens', seenTokens, isWhole(seenTokens, 0, tokens - rows), `a whole number from 0 to ${tokens - rows}`);
    const rotation = [convention === 'interleaved', attentionScale, seenTokens] as const;
    const settings = [sinkTokens, diagonalTokens, samples, seed, ridge, decompositionFormulas.indexOf(formulas)] as const;
    loadAddon().decomposeAttention(stream.native, ...natives, scale, ...rotation, ...settings);
  });
}

/**
 * The options with their defaults for a head.
 * @throws InvalidValueError when one is out of range
 */
export function decomposeOptions(subject: string, options: DecomposeAttentionOptions, headDim: number) {
  const { samples = 80 * headDim, seed = 0, ridge = 1e-6, formulas = 'corrected' } = options;
  expectThat(subject, 'samples', samples, isWhole(samples, 1, 2 ** 20), 'a whole number from 1 to 2^20');
  expectThat(subject, 'seed', seed, isWhole(seed, 0, Number.MAX_SAFE_INTEGER), 'a whole number from 0 to 2^53 - 1');
  expectThat(subject, 'ridge', ridge, isFinite32(ridge) && ridge > 0 && ridge <= 1, 'more than 0 and at most 1');
  expectThat(subject, 'formulas', formulas, decompositionFormulas.includes(formulas), decompositionFormulas.join(' or '));
  return { ...exactTokens(subject, options), samples, seed, ridge, formulas } as const;
}

function expect(name: string, given: unknown, holds: boolean, wanted: string): void {
  expectThat('decomposeAttention', name, given, holds, wanted);
}

/** @throws ShapeError */
function expectExtent(name: string, given: number, wanted: number, why: string): void {
  if (given === wanted) return;
  throw new ShapeError(`decomposeAttention: ${name} has ${given} elements; it must have ${wanted}: ${why}.`, {
    subject: name,
    given,
    wanted,
  });
}
