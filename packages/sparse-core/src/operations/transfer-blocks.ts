import { type DType, dtypes } from '../dtype.js';
import { InvalidValueError } from '../errors.js';
import type { Stream, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { expectIndices, hasRepeated, joined, listFor, listOf } from '../validate.js';

export interface TransferBlocksArguments {
  /** Any dtype, contiguous. */
  readonly source: TensorHandle<DType, readonly [string, 'blockToken', 'dim']>;
  /** Of the dtype of `source`, contiguous. On CUDA at most one of the two is in host memory. */
  readonly destination: TensorHandle<DType, readonly [string, 'blockToken', 'dim']>;
  /** The blocks of `source` to read. */
  readonly from: ArrayLike<number>;
  /** The blocks of `destination` to write, one for each, none twice. */
  readonly to: ArrayLike<number>;
}

/** Its rules are in the order of `native/bindings/transfer-blocks.binding.cc`. */
const enqueue = operation(
  'transferBlocks',
  [
    { name: 'source', dtype: dtypes, shape: ['block', 'blockToken', 'dim'], layout: 'contiguous' },
    { name: 'destination', dtypeOf: 'source', shape: ['writtenBlock', 'blockToken', 'dim'], layout: 'contiguous' },
  ],
  ['destination'],
);

/**
 * Copies blocks of a pool onto blocks of another, which may be in host memory: `destination[to[i]] = source[from[i]]`. On
 * CUDA the copy engine does it, beside the kernels of other streams. Blocks that follow each other in both lists as in both
 * pools are one copy: ascending lists are fastest.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError for blocks that their pools do not have, a block of `to` that appears twice, or two pools in
 * host memory where the device has memory of its own
 */
export function transferBlocks(stream: Stream, args: TransferBlocksArguments): void {
  enqueue(stream, args, (natives, [source, destination]) => {
    const to = listOf('transferBlocks', 'to', args.to, destination.shape[0]);
    const from = listFor('transferBlocks', 'from', args.from, 'to', to.length);
    expectIndices('transferBlocks', 'from', from, source.shape[0]);
    expectIndices('transferBlocks', 'to', to, destination.shape[0]);
    if (hasRepeated(to)) {
      throw new InvalidValueError('transferBlocks: a block of to appears twice; give every copy a block of its own.', {
        subject: 'to',
        given: to,
      });
    }
    loadAddon().transferBlocks(stream.native, ...natives, joined(from, to));
  });
}
