import { type DType, dtypes } from '../dtype.js';
import { InvalidValueError } from '../errors.js';
import type { Stream, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { expectIndices, hasRepeated, joined, listOf } from '../validate.js';

export interface CopyBlocksArguments {
  /** Any dtype, contiguous. */
  readonly pool: TensorHandle<DType, readonly ['block', ...string[]]>;
  /** Numbers of blocks; several may be the same. */
  readonly from: ArrayLike<number>;
  /** As many; none appears twice or in `from`. */
  readonly to: ArrayLike<number>;
}

const enqueue = operation(
  'copyBlocks',
  [{ name: 'pool', dtype: dtypes, shape: ['block', '...'], layout: 'contiguous' }],
  ['pool'],
);

/**
 * Copies blocks of a pool onto others of the same pool: `pool[to[i]] = pool[from[i]]`.
 * @throws ShapeError, DeviceError, DisposedError
 * @throws InvalidValueError for lists of different lengths, blocks outside the pool, or a block of `to` that
 *   appears twice or in `from`
 */
export function copyBlocks(stream: Stream, args: CopyBlocksArguments): void {
  enqueue(stream, args, ([pool], [{ shape }]) => {
    const [blocks = 0] = shape;
    const [from, to] = [listOf('copyBlocks', 'from', args.from, blocks), listOf('copyBlocks', 'to', args.to, blocks)];
    if (from.length !== to.length) {
      throw new InvalidValueError(`copyBlocks: from names ${from.length} blocks and to ${to.length}; pair them up.`, {
        subject: 'to',
        given: to.length,
        wanted: from.length,
      });
    }
    expectIndices('copyBlocks', 'from', from, blocks);
    expectIndices('copyBlocks', 'to', to, blocks);
    if (hasRepeated(to, from)) {
      throw new InvalidValueError(
        'copyBlocks: a block of to appears twice or is read too; give every copy a block of its own.',
        { subject: 'to', given: to },
      );
    }
    using copies = stream.device.tensor('i32', ['end', 'copy'], [2, to.length], joined(from, to));
    loadAddon().copyBlocks(stream.native, pool, copies.native);
  });
}
