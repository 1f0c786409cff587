import type { Stream } from '@kv/sparse-core';
import { loadAddon, operation } from '@kv/sparse-core/native';
import { blockNumbersOn } from './block-arguments.js';
import { type DenseAndHostValues, denseAndHostValueRules, expectValueScales } from './host-values.js';

export interface CopyValuesArguments extends DenseAndHostValues {
  /** The blocks of `values` to read, of which all 64 tokens count. */
  readonly from: ArrayLike<number>;
  /** The blocks of `hostValues` to write, one for each, none twice. */
  readonly to: ArrayLike<number>;
}

/** Its rules are in the order of `native/bindings/copy-values.binding.cc`. */
const enqueue = operation('copyValues', denseAndHostValueRules, ['hostValues', 'valueScales']);

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
    expectValueScales('copyValues', hostValues, valueScales);
    using copies = blockNumbersOn('copyValues', stream, args, values.shape[0], hostValues.shape[0]);
    loadAddon().copyValues(stream.native, ...natives, copies.native);
  });
}
