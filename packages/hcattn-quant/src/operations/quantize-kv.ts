import type { Stream } from '@kv/sparse-core';
import { loadAddon, operation } from '@kv/sparse-core/native';
import {
  blockNumbersOn,
  type DenseAndQuantizedBlocks,
  denseAndQuantizedRules,
  expectQuantizedBlocks,
} from './block-arguments.js';

export interface QuantizeKvArguments extends DenseAndQuantizedBlocks {
  /** The dense blocks to read, of which all 64 tokens count. */
  readonly from: ArrayLike<number>;
  /** The quantized blocks to write, one for each, none twice. */
  readonly to: ArrayLike<number>;
}

const enqueue = operation('quantizeKv', denseAndQuantizedRules, ['quantizedKeys', 'quantizedValues']);

/**
 * Writes dense blocks of keys and values in codes of 8, 4, 3 or 2 bits: `quantized[to[i]] = Q(dense[from[i]])`. Q rotates
 * each token's row, `y = H (s * x) / sqrt(n)`, unless `rotated` is false, and rounds each 32 dims of it to multiples of a
 * step of their own. The step is 1/127, 1/8, 1/4 or 1/2.5 of their largest magnitude, rounded up by at most 1/8. A group
 * with a number that is not finite becomes NaN. Every device makes the same bytes.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws CapabilityError for other than 8, 4, 3 or 2 bits, or heads of more than 512 dims
 * @throws InvalidValueError for blocks that their pools do not have, a block of `to` that appears twice, or a part of
 * what values need
 */
export function quantizeKv(stream: Stream, args: QuantizeKvArguments): void {
  enqueue(stream, args, (natives, [{ shape: dense }, , { shape: quantized }]) => {
    expectQuantizedBlocks('quantizeKv', dense[2], args);
    using copies = blockNumbersOn('quantizeKv', stream, args, dense[0], quantized[0]);
    loadAddon().quantizeKv(stream.native, ...natives, args.keyBits, args.valueBits ?? 0, args.rotated ?? true, copies.native);
  });
}
