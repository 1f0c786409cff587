import type { Stream } from '@kv/sparse-core';
import { loadAddon, operation } from '@kv/sparse-core/native';
import { blockNumbersOn } from './block-arguments.js';
import { type DenseAndHostValues, denseAndHostValueRules, expectValueScales } from './host-values.js';

export interface LoadValuesArguments extends DenseAndHostValues {
  /** The blocks of `hostValues` to read. */
  readonly from: ArrayLike<number>;
  /** The blocks of `values` to write, one for each, none twice. */
  readonly to: ArrayLike<number>;
}

/** Its rules are in the order of `native/bindings/load-values.binding.cc`. */
const enqueue = operation('loadValues', denseAndHostValueRules, ['values']);

/**
 * Writes blocks of a pool of values, usually one in host memory, as dense blocks: `values[to[i]] = hostValues[from[i]]`,
 * codes of i8 times the scale of their token, in f32, rounded once. Every device makes the same bytes.
 * @throws ShapeError, DeviceError, DisposedError
 * @throws DTypeError for i8 without `valueScales`, and the other way round
 * @throws InvalidValueError for blocks that their pools do not have, or a block of `to` that appears twice
 */
export function loadValues(stream: Stream, args: LoadValuesArguments): void {
  enqueue(stream, args, (natives, [values, hostValues, valueScales]) => {
    expectValueScales('loadValues', hostValues, valueScales);
    using copies = blockNumbersOn('loadValues', stream, args, hostValues.shape[0], values.shape[0]);
    loadAddon().loadValues(stream.native, ...natives, copies.native);
  });
}
