import { DTypeError, type FloatDType, type TensorHandle } from '@kv/sparse-core';
import { floats, type TensorRule } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';

/** Values in dense blocks, and in blocks that are usually in host memory. */
export interface DenseAndHostValues {
  /** `[block, blockToken, dim]`, blocks of 64 tokens of one kv head. */
  readonly values: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  /** Of the dtype of `values`; or i8, with `valueScales`. */
  readonly hostValues: TensorHandle<FloatDType | 'i8', readonly ['valueBlock', 'blockToken', 'dim']>;
  /** bf16, for i8 only: what a code of each token stands for. */
  readonly valueScales?: TensorHandle<'bf16', readonly ['valueBlock', 'blockToken']> | undefined;
}

export const denseAndHostValueRules = [
  { name: 'values', dtype: floats, shape: ['block', blockTokens, 'dim'], layout: 'rows' },
  { name: 'hostValues', dtype: ['i8'], dtypeOf: 'values', shape: ['valueBlock', blockTokens, 'dim'], layout: 'contiguous' },
  { name: 'valueScales', dtype: ['bf16'], shape: ['valueBlock', blockTokens], layout: 'contiguous', optional: true },
] as const satisfies readonly TensorRule[];

/** @throws DTypeError for i8 without `valueScales`, and the other way round */
export function expectValueScales(operation: string, hostValues: TensorHandle, valueScales: TensorHandle | undefined): void {
  if ((hostValues.dtype === 'i8') === (valueScales !== undefined)) return;
  throw new DTypeError(
    `${operation}: the values on the host are ${hostValues.dtype}, ${valueScales === undefined ? 'without' : 'with'} valueScales; scales belong to i8.`,
    { subject: 'hostValues', given: hostValues.dtype },
  );
}
