import { ShapeError } from '@kv/sparse-core';
import type { Stream, TensorHandle } from '@kv/sparse-core';
import { expectObject, listFor, loadAddon, operation } from '@kv/sparse-core/native';

import { expectWhole } from '../expect.js';
import { expectSelectOptions, poolings } from '../select-options.js';
import type { SelectTokensOptions } from '../select-options.js';

/** What is asked of one kv head of one batch entry; whole numbers. */
export interface SelectTokensRow {
  /** Tokens that have scores. */
  readonly prefixTokens: number;
  /** Tokens behind the prefix, which are always kept. */
  readonly windowTokens: number;
  /** Tokens to keep, window and sinks included. A larger window is kept all the same. */
  readonly capacity: number;
  /** Tokens of a block: T of the paper. 1 selects single tokens. */
  readonly blockTokens: number;
}

export interface SelectTokensArguments extends SelectTokensOptions {
  /** f32 `[batch, kvHead, token]`, contiguous: a row's first `prefixTokens` are read. NaN counts as −∞. */
  readonly scores: TensorHandle<'f32', readonly ['batch', 'kvHead', 'token']>;
  /** `[batch][kvHead]` */
  readonly rows: readonly (readonly SelectTokensRow[])[];
  /** i32 `[batch, kvHead, kept]`, contiguous: positions in ascending order; room for `keptTokens` of each row. */
  readonly indices: TensorHandle<'i32', readonly ['batch', 'kvHead', 'kept']>;
  /** i32 `[batch, kvHead]`, contiguous: how many of each row of `indices` are valid. */
  readonly counts: TensorHandle<'i32', readonly ['batch', 'kvHead']>;
}

/** How many tokens a row keeps: exactly with `remainder: 'fill'`, at most with `'drop'`. */
export function keptTokens({ prefixTokens, windowTokens, capacity }: SelectTokensRow): number {
  return Math.min(prefixTokens + windowTokens, Math.max(capacity, windowTokens));
}

const enqueue = operation(
  'selectTokens',
  [
    { name: 'scores', dtype: ['f32'], shape: ['batch', 'kvHead', 'token'], layout: 'contiguous' },
    { name: 'indices', dtype: ['i32'], shape: ['batch', 'kvHead', 'kept'], layout: 'contiguous' },
    { name: 'counts', dtype: ['i32'], shape: ['batch', 'kvHead'], layout: 'contiguous' },
  ],
  ['indices', 'counts'],
);

/**
 * Chooses the tokens that a cache keeps, from a score for each (HBW-KV Eq. 5 to 7 and section 3.2.3): blocks of
 * the best mean score, in rounds of more and more groups, each of which has its share. Equal scores go to the
 * lower index, on every device alike. `native/kernels/select-tokens/select-tokens.h` has every rule.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function selectTokens(stream: Stream, args: SelectTokensArguments): void {
  enqueue(stream, args, ([scores, indices, counts], [{ shape }, { shape: kept }]) => {
    const [batch, kvHeads, tokens] = shape;
    const numbers = listFor('selectTokens', 'rows', args.rows, 'batch', batch).flatMap((heads) =>
      listFor('selectTokens', 'rows', heads, 'kvHead', kvHeads).flatMap((row) => rowNumbers(row, tokens, kept[2])),
    );
    expectSelectOptions(args);
    const { rounds = [1, 8], dedup = 'refill', remainder = 'fill', sinkTokens = 0, pooling } = args;
    const asked = Int32Array.from(numbers);
    using rows = stream.device.tensor('i32', ['batch', 'kvHead', 'field'], [batch, kvHeads, 4], asked);
    loadAddon().selectTokens(
      stream.native,
      scores,
      rows.native,
      indices,
      counts,
      Int32Array.from(rounds),
      dedup === 'union',
      remainder === 'fill',
      sinkTokens,
      pooling ? 1 + poolings.indexOf(pooling.kind) : 0,
      // A wider window sees no more scores, and takes longer.
      Math.min(pooling?.tokens ?? 1, 2 * tokens + 1),
    );
  });
}

/** A row in the order that the addon reads it. */
function rowNumbers(row: SelectTokensRow, tokens: number, room: number): readonly number[] {
  expectObject('selectTokens', 'rows', row);
  const { prefixTokens, windowTokens, capacity, blockTokens } = row;
  expectWhole('selectTokens', 'prefixTokens', prefixTokens);
  expectWhole('selectTokens', 'windowTokens', windowTokens);
  expectWhole('selectTokens', 'capacity', capacity);
  expectWhole('selectTokens', 'blockTokens', blockTokens, 1);
  const kept = keptTokens({ prefixTokens, windowTokens, capacity, blockTokens });
  if (prefixTokens > tokens || kept > room) {
    throw new ShapeError(
      `selectTokens: a row keeps ${kept} tokens of ${prefixTokens} with scores; there are ${tokens} scores and ` +
        `room for ${room} indices.`,
      { subject: 'rows', given: row, wanted: { tokens, kept: room } },
    );
  }
  return [prefixTokens, windowTokens, capacity, blockTokens];
}
