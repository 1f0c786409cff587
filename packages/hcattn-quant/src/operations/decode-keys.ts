import type { FloatDType, Stream, TensorHandle } from '@kv/sparse-core';
import { loadAddon, operation } from '@kv/sparse-core/native';
import type { CodedKeys } from '../coded-keys.js';
import { denseKeyRules, expectCodedKeys, type KeyBlockNumbers, keyBlockNumbersOn } from './block-arguments.js';

export interface DecodeKeysArguments extends CodedKeys, KeyBlockNumbers {
  /** `[block, blockToken, dim]`, blocks of 64 tokens of one kv head, 1 to 512 dims. */
  readonly keys: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  /** The coded blocks to read. */
  readonly from: ArrayLike<number>;
  /** The dense blocks to write, one for each, none twice. */
  readonly to: ArrayLike<number>;
}

const enqueue = operation('decodeKeys', denseKeyRules, ['keys']);

/**
 * Writes coded blocks of keys as dense ones, what `encodeKeys` left of them: each code's centroid of kv head `kvHeads[i]`,
 * times `channelScale` in f32, rounded once to the dtype of `keys`. A code beyond the last centroid counts as the last.
 * Spoilt tokens, whose keys were not finite, are NaN.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws CapabilityError for codes of more than 16 bits, heads of more than 512 dims, more than 8192 centroids
 * @throws InvalidValueError for blocks or kv heads that there are not, a block of `to` that appears twice, sub-vectors that
 * do not divide the head, or too few bits
 */
export function decodeKeys(stream: Stream, args: DecodeKeysArguments): void {
  enqueue(stream, args, ([keys, codes, centroids, scale], [{ shape: dense }, { shape: coded }, { shape: books }]) => {
    expectCodedKeys('decodeKeys', dense[2], args);
    using copies = keyBlockNumbersOn('decodeKeys', stream, args, coded[0], dense[0], books[0]);
    loadAddon().decodeKeys(stream.native, keys, codes, centroids, scale, args.codeBits, copies.native);
  });
}
