import type { Stream } from '@kv/sparse-core';
import { loadAddon, operation } from '@kv/sparse-core/native';
import {
  blockNumbersOn,
  type DenseAndQuantizedBlocks,
  denseAndQuantizedRules,
  expectQuantizedBlocks,
} from './block-arguments.js';

export interface DequantizeKvArguments extends DenseAndQuantizedBlocks {
  /** The quantized blocks to read. */
  readonly from: ArrayLike<number>;
  /** The dense blocks to write, one for each, none twice. */
  readonly to: ArrayLike<number>;
}

const enqueue = operation('dequantizeKv', denseAndQuantizedRules, ['keys', 'values']);

/**
 * Writes quantized blocks as dense ones, the reverse of `quantizeKv`: codes times their group's step, rotated back,
 * `x = s * (H y) / sqrt(n)`, unless `rotated` is false, in f32, and rounded once to the dtype of the dense blocks.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws CapabilityError for other than 8, 4, 3 or 2 bits, or heads of more than 512 dims
 * @throws InvalidValueError for blocks that their pools do not have, a block of `to` that appears twice, or a part of
 * what values need
 */
export function dequantizeKv(stream: Stream, args: DequantizeKvArguments): void {
  enqueue(stream, args, (natives, [{ shape: dense }, , { shape: quantized }]) => {
    expectQuantizedBlocks('dequantizeKv', dense[2], args);
    using copies = blockNumbersOn('dequantizeKv', stream, args, quantized[0], dense[0]);
    loadAddon().dequantizeKv(stream.native, ...natives, args.keyBits, args.valueBits ?? 0, args.rotated ?? true, copies.native);
  });
}
