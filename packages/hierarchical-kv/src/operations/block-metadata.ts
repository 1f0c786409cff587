import type { FloatDType, Stream, TensorHandle } from '@kv/sparse-core';
import { expectShape, expectThat, floats, loadAddon, operation } from '@kv/sparse-core/native';
import { type BlockMetadataMethod, blockMetadataMethods, metadataVectors } from '../block-metadata-method.js';
import { type BlockBatch, blockBatchRules, type BlockTableHandle, tableRule } from './block-batch.js';

export interface BlockMetadataArguments extends BlockBatch {
  /** `[block, blockToken, dim]`, blocks of consecutive tokens of one kv head. */
  readonly keys: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  /** i32: the blocks of `keys` of each kv head. */
  readonly blockTable: BlockTableHandle;
  /** i32, of the shape of `blockTable`: the blocks of `metadata`. */
  readonly metadataTable: BlockTableHandle;
  /** `[metadataBlock, vector, dim]`, of the dtype of `keys`: 1 vector with 'mean', 2 with the other methods. */
  readonly metadata: TensorHandle<FloatDType, readonly ['metadataBlock', 'vector', 'dim']>;
  /** With `checksums`: of the shape and strides of `keys`. */
  readonly values?: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']> | undefined;
  /** i32 `[metadataBlock]`: sums by which `fetchBlocks` knows keys and values of the blocks again. */
  readonly checksums?: TensorHandle<'i32', readonly ['metadataBlock']> | undefined;
  /** Rows of the batch, or more. */
  readonly rows: number;
  readonly method: BlockMetadataMethod;
}

/** In the order of `native/bindings/block-metadata.binding.cc`. */
const rules = [
  { name: 'keys', dtype: floats, shape: ['block', 'blockToken', 'dim'], layout: 'rows' },
  tableRule,
  ...blockBatchRules,
  { ...tableRule, name: 'metadataTable' },
  { name: 'metadata', dtypeOf: 'keys', shape: ['metadataBlock', 'vector', 'dim'], layout: 'contiguous' },
  { name: 'values', dtypeOf: 'keys', shape: ['block', 'blockToken', 'dim'], layout: 'rows', stridesOf: 'keys', optional: true },
  { name: 'checksums', dtype: ['i32'], shape: ['metadataBlock'], layout: 'contiguous', optional: true },
] as const;

const enqueue = operation('blockMetadata', rules, ['metadata', 'checksums']);

/**
 * Writes what blocks of keys are scored by, of every block that rows of the batch filled; `keyCounts` includes the rows. Of
 * each dim: with 'mean' the mean of the keys, with 'minMax' the least and the largest, with 'cuboidMean' `mid - half` and
 * `mid + half`, where `mid` is the middle of least and largest and `half` the mean distance from it (ArkVale). Sums are f32,
 * token by token: every device makes the same bytes. With `values` and `checksums` it also writes checksums of the blocks.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError for another method; tables that lead outside reject the stream's next wait with one
 */
export function blockMetadata(stream: Stream, args: BlockMetadataArguments): void {
  enqueue(stream, args, (natives, [, , , , , , metadata]) => {
    const name = 'blockMetadata';
    const { method, rows } = args;
    expectThat(name, 'method', method, blockMetadataMethods.includes(method), `one of ${blockMetadataMethods.join(', ')}`);
    expectThat(name, 'checksums', args.checksums, (args.values === undefined) === (args.checksums === undefined), 'given together with values');
    expectThat(name, 'rows', rows, Number.isInteger(rows) && rows >= 0 && rows < 2 ** 31, 'a number of rows');
    expectShape(name, 'metadata', metadata, [undefined, metadataVectors(method), undefined]);
    loadAddon().blockMetadata(stream.native, ...natives, rows, blockMetadataMethods.indexOf(method));
  });
}
