import type { Stream } from '@kv/sparse-core';
import { expectIndices, listFor, loadAddon, operation } from '@kv/sparse-core/native';
import type { KvOperand, MixedBlocks, SparseBlocks } from '../mixed-blocks.js';
import { denseRule, expectOperand, expectSparseBlocks, sparseRules } from './block-arguments.js';

export interface Decompress24Arguments {
  readonly operand: KvOperand;
  readonly sparse: SparseBlocks;
  /** Which sparse blocks to write out. */
  readonly ids: readonly number[];
  /** `[block, blockToken, dim]`, contiguous: one block for each id. */
  readonly dense: MixedBlocks['dense'];
}

const enqueue = operation('decompress24', [denseRule('dense'), ...sparseRules('sparse', 'dense')], ['dense']);

/**
 * Writes sparse blocks out as dense ones, zero where nothing was kept: the inverse of `compress24`.
 * @throws CapabilityError, ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError for an id that the pool does not have; blocks that begin inside 16 bytes reject the stream's
 * next wait with a CapabilityError
 */
export function decompress24(stream: Stream, args: Decompress24Arguments): void {
  enqueue(stream, args, ([dense, nonZeros, metadata], tensors) => {
    const { operand } = args;
    expectOperand('decompress24', operand);
    expectSparseBlocks('decompress24', ...tensors);
    const [{ shape: denseShape }, { shape: sparseShape }] = tensors;
    const ids = listFor('decompress24', 'ids', args.ids, 'block', denseShape[0]);
    expectIndices('decompress24', 'ids', ids, sparseShape[0]);
    using idTensor = stream.device.tensor('i32', ['id'], [ids.length], Int32Array.from(ids));
    loadAddon().decompress24(stream.native, operand === 'values', nonZeros, metadata, idTensor.native, dense);
  });
}
