import { ShapeError } from '@kv/sparse-core';
import type { FloatDType, PagedRows, Stream, TensorHandle } from '@kv/sparse-core';
import {
  expectContiguous,
  expectContiguousRows,
  expectDType,
  expectShape,
  loadAddon,
  nativeOf,
  nativePagedRows,
} from '@kv/sparse-core/native';

import { expectChoice, expectThat } from '../expect.js';

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

/**
 * How much the last queries of a prompt look at each key before them (HBW-KV Eq. 3 and 4): the softmax of
 * `scale q·k`, in f32, summed over the window's queries and reduced over the query heads of each kv head.
 * Entries may have different lengths, and heads different counts. Working memory grows with the keys, never
 * with queries times keys.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError; tables that lead outside and a
 * prefix that is longer than the scores reject the stream's next wait with an InvalidValueError
 */
export function observationScores(stream: Stream, args: ObservationScoresArguments): void {
  const { query, scores, blocks, slots, scale, domain = 'full', groupReduction = 'mean' } = args;
  const operation = 'observationScores';
  const nativeQuery = nativeOf(operation, 'query', query, stream);
  const nativeScores = nativeOf(operation, 'scores', scores, stream);
  const paged = nativePagedRows(operation, args, stream);
  const kvHeads = blocks.keyCounts.shape[1];
  expectDType(operation, 'query', query, ['f32', 'f16', 'bf16']);
  expectShape(operation, 'query', query, [undefined, undefined, blocks.keys.shape[2]]);
  expectContiguousRows(operation, 'query', query);
  expectDType(operation, 'scores', scores, ['f32']);
  expectShape(operation, 'scores', scores, [slots.shape[0], kvHeads, undefined]);
  expectContiguous(operation, 'scores', scores);
  if (query.shape[1] % kvHeads !== 0) {
    throw new ShapeError(
      `observationScores: there are ${query.shape[1]} query heads and ${kvHeads} kv heads; the query heads must ` +
        'be a multiple of them.',
      { subject: 'query', given: query.shape[1], wanted: kvHeads },
    );
  }
  expectThat(scale > 0 && scale < Infinity, 'scale', scale, 'a positive number');
  expectChoice('domain', domain, scoreDomains);
  expectChoice('groupReduction', groupReduction, groupReductions);
  loadAddon().observationScores(
    stream.native,
    nativeQuery.native,
    nativeScores.native,
    ...paged,
    scale,
    scoreDomains.indexOf(domain),
    groupReductions.indexOf(groupReduction),
  );
  nativeScores.writtenBy(stream);
}
