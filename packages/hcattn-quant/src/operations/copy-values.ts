import { DTypeError, type FloatDType, type Stream, type TensorHandle } from '@kv/sparse-core';
import { floats, loadAddon, operation } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';
import { blockNumbersOn } from './block-arguments.js';

export interface CopyValuesArguments {
  /** `[block, blockToken, dim]`, blocks of 64 tokens of one kv head. */
  readonly values: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  /** Of the dtype of `values`; or i8, with `valueScales`. Usually in host memory. */
  readonly hostValues: TensorHandle<FloatDType | 'i8', readonly ['valueBlock', 'blockToken', 'dim']>;
  /** bf16, for i8 only: what a code of each token stands for. */
  readonly valueScales?: TensorHandle<'bf16', readonly ['valueBlock', 'blockToken']> | undefined;
  /** The blocks of `values` to read, of which all 64 tokens count. */
  readonly from: ArrayLike<number>;
  /** The blocks of `hostValues` to write, one for each, none twice. */
  readonly to: ArrayLike<number>;
}

/** In the order of `native/bindings/copy-values.binding.cc`. */
const rules = [
  { name: 'values', dtype: floats, shape: ['block', blockTokens, 'dim'], layout: 'rows' },
  { name: 'hostValues', dtype: ['i8'], dtypeOf: 'values', shape: ['valueBlock', blockTokens, 'dim'], layout: 'contiguous' },
  { name: 'valueScales', dtype: ['bf16'], shape: ['valueBlock', blockTokens], layout: 'contiguous', optional: true },
] as const;

const enqueue = operation('copyValues', rules, ['hostValues', 'valueScales']);

/**
 * Copies blocks of values to another pool, usually to one in host memory: `hostValues[to[i]] = values[from[i]]`. A pool of
 * i8 gets codes, `round(value / scale)`, ties to even, with a scale for each token: its largest magnitude / 127, rounded up
 * to bf16, or NaN if it has a number that is not finite. Every device makes the same bytes.
 * @throws ShapeError, DeviceError, DisposedError
 * @throws DTypeError for i8 without `valueScales`, and the other way round
 * @throws InvalidValueError for blocks that their pools do not have, or a block of `to` that appears twice
 */
export function copyValues(stream: Stream, args: CopyValuesArguments): void {
  enqueue(stream, args, (natives, [values, hostValues, valueScales]) => {
    if ((hostValues.dtype === 'i8') !== (valueScales !== undefined)) {
      throw new DTypeError(
        `copyValues: hostValues are ${hostValues.dtype}, ${valueScales === undefined ? 'without' : 'with'} valueScales; scales belong to i8.`,
        { subject: 'hostValues', given: hostValues.dtype },
      );
    }
    using copies = blockNumbersOn('copyValues', stream, args, values.shape[0], hostValues.shape[0]);
    loadAddon().copyValues(stream.native, ...natives, copies.native);
  });
}
