import { InvalidValueError } from '../errors.js';
import type { DType } from '../dtype.js';
import { loadAddon } from '../load-addon.js';
import type { Stream } from '../stream.js';
import type { TensorHandle } from '../tensor.js';
import { expectContiguous, nativeOf } from '../validate.js';

export interface CopyBlocksArguments {
  /** Any dtype, contiguous. */
  readonly pool: TensorHandle<DType, readonly ['block', ...string[]]>;
  /** Numbers of blocks; several may be the same. */
  readonly from: readonly number[];
  /** As many; none appears twice or in `from`. */
  readonly to: readonly number[];
}

/**
 * Copies blocks of a pool onto others of the same pool: `pool[to[i]] = pool[from[i]]`.
 * @throws ShapeError, DeviceError, DisposedError
 * @throws InvalidValueError for lists of different lengths, blocks outside the pool, or a block of `to` that
 *   appears twice or in `from`
 */
export function copyBlocks(stream: Stream, { pool, from, to }: CopyBlocksArguments): void {
  const native = nativeOf('copyBlocks', 'pool', pool, stream);
  expectContiguous('copyBlocks', 'pool', pool);
  const [blocks] = pool.shape;
  if (from.length !== to.length) {
    throw new InvalidValueError(`copyBlocks: from names ${from.length} blocks and to ${to.length}; pair them up.`, {
      subject: 'to',
      given: to.length,
      wanted: from.length,
    });
  }
  for (const [name, list] of Object.entries({ from, to })) {
    const outside = list.find((block) => !Number.isInteger(block) || block < 0 || block >= blocks);
    if (outside !== undefined) {
      throw new InvalidValueError(`copyBlocks: ${name} names block ${outside}; the pool has ${blocks}.`, {
        subject: name,
        given: outside,
        wanted: blocks,
      });
    }
  }
  const read = new Set(from);
  if (new Set(to).size !== to.length || to.some((block) => read.has(block))) {
    throw new InvalidValueError(
      'copyBlocks: a block of to appears twice or is read too; give every copy a block of its own.',
      { subject: 'to', given: to },
    );
  }
  const { device } = stream;
  using sources = device.tensor('i32', ['copy'], [from.length], Int32Array.from(from));
  using targets = device.tensor('i32', ['copy'], [to.length], Int32Array.from(to));
  loadAddon().copyBlocks(stream.native, native.native, sources.native, targets.native);
  native.writtenBy(stream);
}
