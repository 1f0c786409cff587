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
import type { Blocks24 } from '../blocks-24.js';
import { denseRule, expectSparseBlocks, sparseRules, tableRule } from './block-arguments.js';

export interface Attention24Arguments extends Omit<AttentionArguments, 'blocks'> {
  readonly keys: Blocks24;
  /** Of the same heads, and dense blocks of the same number as the keys'. */
  readonly values: Blocks24;
  /** i32: how many tokens each kv head of each slot holds. A sparse block has 64 of them. */
  readonly keyCounts: TensorHandle<'i32', readonly ['slot', 'kvHead']>;
  /** False promises that no block that is read is sparse, so that it need not be asked. Default: true. */
  readonly sparseKeys?: boolean | undefined;
  /** As `sparseKeys`, of values. */
  readonly sparseValues?: boolean | undefined;
}

/** In the order of `native/bindings/blocks-24.h`, but for the settings in their midst. */
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
 * The operation that checks the arguments of attention over dense and 2:4 blocks and enqueues it.
 * @throws CapabilityError, ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function attention24(name: 'prefillAttention24' | 'decodeAttention24') {
  const enqueue = operation(name, rules, ['output', 'logSumExp']);
  return (stream: Stream, args: Attention24Arguments): void => {
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
        {
          valueTable,
          keyNonZeros,
          valueNonZeros,
          keyMetadata,
          valueMetadata,
          hasSparseKeys: sparseKeys,
          hasSparseValues: sparseValues,
        },
      );
    });
  };
}
