import type { FloatDType, PagedRows, Stream, TensorHandle } from '@kv/sparse-core';
import { expectHeads, expectThat, floats, isFinite32, loadAddon, operation, pagedRowRules } from '@kv/sparse-core/native';

import { expectChoice } from '../expect.js';

/** The keys of a softmax's denominator, in the order of `ScoreDomain` in the operation's header. */
export const scoreDomains = ['full', 'prefix'] as const;
/** In the order of `GroupReduction` in the operation's header. */
export const groupReductions = ['mean', 'max', 'sum'] as const;

/**
 * `full`: the prefix, and of the window the query's own key and those before it, as SnapKV. `prefix`: the
 * prefix only, as HBW-KV Eq. 3 is written.
 */
export type ScoreDomain = (typeof scoreDomains)[number];

/** Over the query heads that read one kv head. */
export type GroupReduction = (typeof groupReductions)[number];

/** The rows of a batch entry are its observation window: the last queries of its slot, in order. */
export interface ObservationScoresArguments extends PagedRows {
  /** `[token, queryHead, dim]`, after RoPE; query heads are a multiple of the cache's kv heads. */
  readonly query: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /**
   * f32 `[batch, kvHead, token]`, contiguous. Of each row the elements of the prefix are written, which are all
   * keys that the kv head holds but the last ones, as many as the entry has rows. A score below 2^-126 is a
   * subnormal number, in the right order but smaller or larger than the sum that it stands for.
   */
  readonly scores: TensorHandle<'f32', readonly ['batch', 'kvHead', 'token']>;
  /** Products are multiplied by this before the softmax; positive, usually `1 / sqrt(headDim)`. */
  readonly scale: number;
  /** Default: `full`. */
  readonly domain?: ScoreDomain | undefined;
  /** Default: `mean`. */
  readonly groupReduction?: GroupReduction | undefined;
}

const enqueue = operation(
  'observationScores',
  [
    { name: 'query', dtype: floats, shape: ['token', 'queryHead', 'dim'], layout: 'rows' },
    { name: 'scores', dtype: ['f32'], shape: ['batch', 'kvHead', 'prefixToken'], layout: 'contiguous' },
    ...pagedRowRules,
  ],
  ['scores'],
);

/**
 * How much the last queries of a prompt look at each key before them (HBW-KV Eq. 3 and 4): the softmax of
 * `scale q·k`, in f32, summed over the window's queries and reduced over the query heads of each kv head.
 * Entries may have different lengths, and heads different counts. Working memory grows with the keys, never
 * with queries times keys.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError; tables that lead outside and a
 * prefix that is longer than the scores reject the stream's next wait with an InvalidValueError
 */
export function observationScores(stream: Stream, args: ObservationScoresArguments): void {
  enqueue(stream, args, (natives, [query, { shape }]) => {
    expectHeads('observationScores', query, shape[1]);
    const { scale, domain = 'full', groupReduction = 'mean' } = args;
    expectThat('observationScores', 'scale', scale, isFinite32(scale) && Math.fround(scale) > 0, 'a positive f32');
    expectChoice('observationScores', 'domain', domain, scoreDomains);
    expectChoice('observationScores', 'groupReduction', groupReduction, groupReductions);
    const choices = [scoreDomains.indexOf(domain), groupReductions.indexOf(groupReduction)] as const;
    loadAddon().observationScores(stream.native, ...natives, scale, ...choices);
  });
}
