import type { AttentionArguments, Stream, TensorHandle } from '@kv/sparse-core';
import {
  attentionRules,
  attentionSettings,
  batchRules,
  expectBoolean,
  expectHeads,
  loadAddon,
  operation,
} from '@kv/sparse-core/native';
import type { MixedBlocks } from '../mixed-blocks.js';
import { denseRule, expectSparseBlocks, sparseRules, tableRule } from './block-arguments.js';

export interface MixedAttentionArguments extends Omit<AttentionArguments, 'blocks'> {
  readonly keys: MixedBlocks;
  /** Of the same heads, and dense blocks of the same number as the keys'. */
  readonly values: MixedBlocks;
  /** i32: how many tokens each kv head of each slot holds. A sparse block has 64 of them. */
  readonly keyCounts: TensorHandle<'i32', readonly ['slot', 'kvHead']>;
  /** False promises that no block that is read is sparse, so that it need not be asked. Default: true. */
  readonly sparseKeys?: boolean | undefined;
  readonly sparseValues?: boolean | undefined;
}

/** In the order of `native/bindings/mixed-blocks.h`, but for the settings in their midst. */
const rules = [
  ...attentionRules,
  denseRule('keys.dense'),
  { ...denseRule('values.dense'), dtypeOf: 'keys.dense', dtype: [] },
  tableRule('keys.table'),
  { name: 'keyCounts', dtype: ['i32'], shape: ['slot', 'kvHead'], layout: 'contiguous' },
  ...batchRules,
  tableRule('values.table'),
  ...sparseRules('keys.sparse', 'keys.dense'),
  ...sparseRules('values.sparse', 'values.dense'),
] as const;

/**
 * The operation that checks the arguments of attention over mixed blocks and enqueues it.
 * @throws CapabilityError, ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function mixedAttention(name: 'mixedPrefillAttention' | 'mixedDecodeAttention') {
  const enqueue = operation(name, rules, ['output', 'logSumExp']);
  return (stream: Stream, args: MixedAttentionArguments): void => {
    enqueue(stream, args, (natives, tensors) => {
      const [query, output, logSumExp, keys, values, table, counts, slots, starts, valueTable, ...sparse] = natives;
      const [keyNonZeros, keyMetadata, valueNonZeros, valueMetadata] = sparse;
      const [queryTensor, , , keysTensor, valuesTensor, , countsTensor, , , , ...sparseTensors] = tensors;
      expectSparseBlocks(name, keysTensor, sparseTensors[0], sparseTensors[1]);
      expectSparseBlocks(name, valuesTensor, sparseTensors[2], sparseTensors[3]);
      expectHeads(name, queryTensor, countsTensor.shape[1]);
      const { sparseKeys = true, sparseValues = true } = args;
      expectBoolean(name, 'sparseKeys', sparseKeys);
      expectBoolean(name, 'sparseValues', sparseValues);
      loadAddon()[name](
        stream.native,
        query,
        output,
        logSumExp,
        keys,
        values,
        table,
        counts,
        slots,
        starts,
        ...attentionSettings(name, args),
        valueTable,
        keyNonZeros,
        valueNonZeros,
        keyMetadata,
        valueMetadata,
        sparseKeys,
        sparseValues,
      );
    });
  };
}
