import { InvalidValueError, ShapeError } from '../errors.js';
import type { Stream, Tensor, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import type { PagedBlocks } from '../paged-blocks.js';
import { show } from '../show.js';
import { listFor } from '../validate.js';
import { pagedBlockRules } from './attention-arguments.js';

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

const enqueue = operation(
  'gatherKv',
  [
    ...pagedBlockRules,
    { name: 'indices', dtype: ['i32'], shape: ['kvHead', 'kept'], layout: 'rows' },
    { name: 'outcomes', dtype: ['i32'], shape: ['kvHead'], layout: 'rows', optional: true },
  ],
  ['blocks.keys', 'blocks.values', 'blocks.keyCounts', 'outcomes'],
);

/**
 * Keeps only the selected tokens of a slot, moved to the front of its blocks in the same order, and sets its
 * key counts: `key[i] = key[indices[i]]` for each kv head, and the same for values. The blocks behind them
 * are free for other use afterwards, in stream order.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError; without `outcomes`, indices that do not
 * ascend or lie outside the slot reject the stream's next wait with an InvalidValueError, and nothing is moved
 */
export function gatherKv(stream: Stream, args: GatherKvArguments): void {
  enqueue(stream, args, ([keys, values, , , indices, outcomes], [, , blockTable, keyCounts, { shape }]) => {
    const { slot } = args;
    const [slots] = keyCounts.shape;
    if (!Number.isInteger(slot) || slot < 0 || slot >= slots) {
      throw new InvalidValueError(`gatherKv: slot ${show(slot)} does not exist; the cache has ${slots}.`, {
        subject: 'slot',
        given: slot,
        wanted: slots,
      });
    }
    const [kvHeads, most] = shape;
    const counts = listFor('gatherKv', 'counts', args.counts, 'kvHead', kvHeads);
    if (!counts.every((count) => Number.isInteger(count) && count >= 0 && count <= most)) {
      throw new ShapeError(`gatherKv: counts is ${show(counts)}; it must have whole numbers up to ${most}.`, {
        subject: 'counts',
        given: counts,
        wanted: [kvHeads, most],
      });
    }
    const ofSlot = (table: Tensor) => table.slice(table.axes[0] ?? '', slot, slot + 1).native;
    using kept = stream.device.tensor('i32', ['kvHead'], [kvHeads], Int32Array.from(counts));
    const tables = [ofSlot(blockTable), ofSlot(keyCounts)] as const;
    loadAddon().gatherKv(stream.native, keys, values, ...tables, indices, kept.native, outcomes);
  });
}
