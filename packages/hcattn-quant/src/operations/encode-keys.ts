import type { FloatDType, Stream, TensorHandle } from '@kv/sparse-core';
import { expectShape, loadAddon, operation } from '@kv/sparse-core/native';
import type { CodedKeys } from '../coded-keys.js';
import { denseKeyRules, expectCodedKeys, type KeyBlockNumbers, keyBlockNumbersOn } from './block-arguments.js';
import { centroidIndexBytes } from './index-centroids.js';

export interface EncodeKeysArguments extends CodedKeys, KeyBlockNumbers {
  /** `[block, blockToken, dim]`, blocks of 64 tokens of one kv head after RoPE, 1 to 512 dims, of which all count. */
  readonly keys: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  /** u8 `[kvHead, book, byte]`: what `indexCentroids` made of `centroids`. */
  readonly index: TensorHandle<'u8', readonly ['kvHead', 'book', 'byte']>;
  /** The dense blocks to read. */
  readonly from: ArrayLike<number>;
  /** The coded blocks to write, one for each, none twice. */
  readonly to: ArrayLike<number>;
}

/** In the order of `native/bindings/encode-keys.binding.cc`. */
const rules = [
  ...denseKeyRules,
  { name: 'index', dtype: ['u8'], shape: ['kvHead', 'book', 'indexByte'], layout: 'contiguous' },
] as const;

const enqueue = operation('encodeKeys', rules, ['codedKeys']);

/**
 * Writes dense blocks of keys in codes, `codedKeys[to[i]] = code(keys[from[i]])`: of each sub-vector of a key, divided by
 * `channelScale`, the number of the nearest centroid of kv head `kvHeads[i]` (HCAttention, section 3.1). The nearest is
 * exact in f32, the lowest number of equally near ones, and the same on every device. A sub-vector with a NaN, or
 * infinitely far from every centroid, gets code 0, and its token is marked as spoilt. It is fastest if blocks of one kv
 * head follow each other.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws CapabilityError for codes of more than 16 bits, heads of more than 512 dims, more than 8192 centroids
 * @throws InvalidValueError for blocks or kv heads that there are not, a block of `to` that appears twice, sub-vectors that
 * do not divide the head, or too few bits
 */
export function encodeKeys(stream: Stream, args: EncodeKeysArguments): void {
  enqueue(stream, args, ([keys, codes, centroids, scale, index], [{ shape: dense }, { shape: coded }, { shape: books }]) => {
    const name = 'encodeKeys';
    expectCodedKeys(name, dense[2], args);
    expectShape(name, 'index', args.index, [books[0], books[1], centroidIndexBytes(books[2], books[3])]);
    using copies = keyBlockNumbersOn(name, stream, args, dense[0], coded[0], books[0]);
    loadAddon().encodeKeys(stream.native, keys, codes, centroids, scale, args.codeBits, copies.native, index);
  });
}
