import { InvalidValueError, type Stream } from '@kv/sparse-core';
import { expectIndices, listFor, listOf, loadAddon, operation } from '@kv/sparse-core/native';
import type { KvOperand, Blocks24, SparseBlocks24 } from '../blocks-24.js';
import { denseRule, expectOperand, expectSparseBlocks, sparseRules } from './block-arguments.js';

export interface Decompress24Arguments {
  readonly operand: KvOperand;
  readonly sparse: SparseBlocks24;
  /** Which sparse blocks to write out. */
  readonly ids: ArrayLike<number>;
  /** `[block, blockToken, dim]`, contiguous. */
  readonly dense: Blocks24['dense'];
  /** Which of its blocks they are written to, none twice. Default: to the first, of which there is one for each id. */
  readonly places?: ArrayLike<number> | undefined;
}

const enqueue = operation('decompress24', [denseRule('dense'), ...sparseRules('sparse', 'dense')], ['dense']);

/**
 * Writes sparse blocks out as dense ones, zero where nothing was kept: the inverse of `compress24`.
 * @throws CapabilityError, ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError for an id or a place that its pool does not have; blocks that begin inside 16 bytes reject the stream's
 * next wait with a CapabilityError
 */
export function decompress24(stream: Stream, args: Decompress24Arguments): void {
  enqueue(stream, args, ([dense, nonZeros, metadata], tensors) => {
    const { operand } = args;
    expectOperand('decompress24', operand);
    expectSparseBlocks('decompress24', ...tensors);
    const [{ shape: denseShape }, { shape: sparseShape }] = tensors;
    const [blocks] = denseShape;
    const ids = args.places
      ? listOf('decompress24', 'ids', args.ids, blocks)
      : listFor('decompress24', 'ids', args.ids, 'block', blocks);
    const places = args.places ? listFor('decompress24', 'places', args.places, 'ids', ids.length) : [...ids.keys()];
    expectIndices('decompress24', 'ids', ids, sparseShape[0]);
    expectIndices('decompress24', 'places', places, blocks);
    if (new Set(places).size !== places.length) {
      throw new InvalidValueError('decompress24: a block of places appears twice; give every one a block of its own.', {
        subject: 'places',
        given: places,
      });
    }
    const list = (numbers: readonly number[]) =>
      stream.device.tensor('i32', ['id'], [ids.length], Int32Array.from(numbers));
    using idTensor = list(ids);
    using placeTensor = list(places);
    loadAddon().decompress24(
      stream.native,
      operand === 'values',
      nonZeros,
      metadata,
      idTensor.native,
      placeTensor.native,
      dense,
    );
  });
}
