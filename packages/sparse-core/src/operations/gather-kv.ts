import { InvalidValueError, ShapeError } from '../errors.js';
import { loadAddon } from '../load-addon.js';
import type { PagedBlocks } from '../paged-blocks.js';
import type { Stream } from '../stream.js';
import type { TensorHandle } from '../tensor.js';
import { expectContiguousRows, expectDType, expectShape, nativeOf } from '../validate.js';

export interface GatherKvArguments {
  readonly blocks: PagedBlocks;
  /** The sequence whose tokens are selected. */
  readonly slot: number;
  /** i32 `[kvHead, kept]`: indices into what the slot holds, each row strictly ascending. */
  readonly indices: TensorHandle<'i32', readonly ['kvHead', 'kept']>;
  /** How many of each row of `indices` are valid, one per kv head. */
  readonly counts: readonly number[];
  /**
   * i32 `[kvHead]`: 1 where the indices of a kv head do not ascend or lie outside the slot, else 0. Such a head keeps
   * its first tokens instead, as many as it was to keep, and the stream goes on. Default: that fails the stream.
   */
  readonly outcomes?: TensorHandle<'i32', readonly ['kvHead']> | undefined;
}

/**
 * Keeps only the selected tokens of a slot, moved to the front of its blocks in the same order, and sets its
 * key counts: `key[i] = key[indices[i]]` for each kv head, and the same for values. The blocks behind them
 * are free for other use afterwards, in stream order.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError; without `outcomes`, indices that do not
 * ascend or lie outside the slot reject the stream's next wait with an InvalidValueError, and nothing is moved
 */
export function gatherKv(stream: Stream, { blocks, slot, indices, counts, outcomes }: GatherKvArguments): void {
  const { keys, values, blockTable, keyCounts } = blocks;
  const [slots, kvHeads] = keyCounts.shape;
  if (!Number.isInteger(slot) || slot < 0 || slot >= slots) {
    throw new InvalidValueError(`gatherKv: slot ${slot} does not exist; the cache has ${slots}.`, {
      subject: 'slot',
      given: slot,
      wanted: slots,
    });
  }
  const native = {
    keys: nativeOf('gatherKv', 'keys', keys, stream),
    values: nativeOf('gatherKv', 'values', values, stream),
    blockTable: nativeOf('gatherKv', 'blockTable', blockTable.slice('slot', slot, slot + 1), stream),
    keyCounts: nativeOf('gatherKv', 'keyCounts', keyCounts.slice('slot', slot, slot + 1), stream),
    indices: nativeOf('gatherKv', 'indices', indices, stream),
    outcomes: outcomes && nativeOf('gatherKv', 'outcomes', outcomes, stream),
  };
  expectDType('gatherKv', 'indices', indices, ['i32']);
  expectShape('gatherKv', 'indices', indices, [kvHeads, undefined]);
  if (outcomes !== undefined) {
    expectDType('gatherKv', 'outcomes', outcomes, ['i32']);
    expectShape('gatherKv', 'outcomes', outcomes, [kvHeads]);
    expectContiguousRows('gatherKv', 'outcomes', outcomes);
  }
  const valid = counts.every((count) => Number.isInteger(count) && count >= 0 && count <= indices.shape[1]);
  if (counts.length !== kvHeads || !valid) {
    throw new ShapeError(
      `gatherKv: counts is [${counts.join(', ')}]; it must have ${kvHeads} whole numbers up to ${indices.shape[1]}.`,
      { subject: 'counts', given: counts, wanted: [kvHeads, indices.shape[1]] },
    );
  }
  using kept = stream.device.tensor('i32', ['kvHead'], [kvHeads], Int32Array.from(counts));
  loadAddon().gatherKv(
    stream.native,
    native.keys.native,
    native.values.native,
    native.blockTable.native,
    native.keyCounts.native,
    native.indices.native,
    kept.native,
    native.outcomes?.native,
  );
  for (const tensor of [native.keys, native.values, native.keyCounts]) tensor.writtenBy(stream);
  native.outcomes?.writtenBy(stream);
}
