import { ShapeError } from '@kv/sparse-core';
import type { Stream, TensorHandle } from '@kv/sparse-core';
import { expectContiguous, expectDType, expectShape, loadAddon, nativeOf } from '@kv/sparse-core/native';

import { expectPositive, expectWhole } from '../expect.js';
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

/**
 * Chooses the tokens that a cache keeps, from a score for each (HBW-KV Eq. 5 to 7 and section 3.2.3): blocks of
 * the best mean score, in rounds of more and more groups, each of which has its share. Equal scores go to the
 * lower index, on every device alike. `native/kernels/select-tokens/select-tokens.h` has every rule.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function selectTokens(stream: Stream, args: SelectTokensArguments): void {
  const { scores, indices, counts, rows, pooling } = args;
  const { rounds = [1, 8], dedup = 'refill', remainder = 'fill', sinkTokens = 0 } = args;
  const operation = 'selectTokens';
  const native = {
    scores: nativeOf(operation, 'scores', scores, stream).native,
    indices: nativeOf(operation, 'indices', indices, stream),
    counts: nativeOf(operation, 'counts', counts, stream),
  };
  expectDType(operation, 'scores', scores, ['f32']);
  expectDType(operation, 'indices', indices, ['i32']);
  expectDType(operation, 'counts', counts, ['i32']);
  expectShape(operation, 'scores', scores, [undefined, undefined, undefined]);
  const [batch, kvHeads, tokens] = scores.shape;
  expectShape(operation, 'indices', indices, [batch, kvHeads, undefined]);
  expectShape(operation, 'counts', counts, [batch, kvHeads]);
  for (const [name, tensor] of Object.entries({ scores, indices, counts })) expectContiguous(operation, name, tensor);
  if (rows.length !== batch || rows.some((heads) => heads.length !== kvHeads)) {
    throw new ShapeError(`selectTokens: rows must be ${batch} lists of ${kvHeads}, as scores has batch and kvHead.`, {
      subject: 'rows',
      given: rows.map((heads) => heads.length),
      wanted: [batch, kvHeads],
    });
  }
  for (const row of rows.flat()) expectRow(row, tokens, indices.shape[2]);
  expectSelectOptions(args);
  const numbers = rows.flat().flatMap((row) => [row.prefixTokens, row.windowTokens, row.capacity, row.blockTokens]);
  const asked = Int32Array.from(numbers);
  using rowTensor = stream.device.tensor('i32', ['batch', 'kvHead', 'field'], [batch, kvHeads, 4], asked);
  loadAddon().selectTokens(
    stream.native,
    native.scores,
    nativeOf(operation, 'rows', rowTensor, stream).native,
    native.indices.native,
    native.counts.native,
    Int32Array.from(rounds),
    dedup === 'union',
    remainder === 'fill',
    sinkTokens,
    pooling ? 1 + poolings.indexOf(pooling.kind) : 0,
    pooling?.tokens ?? 1,
  );
  native.indices.writtenBy(stream);
  native.counts.writtenBy(stream);
}

function expectRow(row: SelectTokensRow, tokens: number, room: number): void {
  const { prefixTokens, windowTokens, capacity, blockTokens } = row;
  expectWhole('prefixTokens', prefixTokens);
  expectWhole('windowTokens', windowTokens);
  expectWhole('capacity', capacity);
  expectPositive('blockTokens', blockTokens);
  const kept = keptTokens(row);
  if (prefixTokens > tokens || kept > room) {
    throw new ShapeError(
      `selectTokens: a row keeps ${kept} tokens of ${prefixTokens} with scores; there are ${tokens} scores and ` +
        `room for ${room} indices.`,
      { subject: 'rows', given: row, wanted: { tokens, kept: room } },
    );
  }
}
