import type { Stream } from '@kv/sparse-core';
import { expectDType, expectShape, nativeOf, reading } from '@kv/sparse-core/native';

import { expectWholeNumber } from '../expect-whole-number.js';
import type { DeviceIds } from './batch-entry.js';

/** Whether token ids are those of a tensor. */
export function isOnDevice(ids: ArrayLike<number> | DeviceIds): ids is DeviceIds {
  return reading('the token ids', () => typeof ids === 'object' && 'dtype' in ids);
}

/** @throws DTypeError, ShapeError, DeviceError, DisposedError unless they are token ids that a stream can read */
export function expectDeviceIds(operation: string, ids: DeviceIds, stream: Stream): void {
  nativeOf(operation, 'ids', ids, stream);
  expectDType(operation, 'ids', ids, ['i32']);
  expectShape(operation, 'ids', ids, [undefined]);
}

/** How many token ids a caller gave. @throws InvalidValueError when they have no length that can be read */
export function countIds(ids: ArrayLike<number>): number {
  return reading('the token ids', () => ids.length);
}

/**
 * A copy of the first `count` token ids that a caller gave. Each is read once, since an array-like may be a Proxy, lie
 * about its length, or be shared with another thread that changes it.
 * @throws InvalidValueError for an id that is none of the vocabulary's, or that cannot be read
 */
export function copyIds(given: ArrayLike<number>, count: number, vocabularySize: number): Int32Array {
  return reading('the token ids', () => {
    const ids = new Int32Array(count);
    for (let index = 0; index < count; index += 1) {
      const id = given[index] ?? -1;
      if (!Number.isInteger(id) || id < 0 || id >= vocabularySize) {
        expectWholeNumber(`token id at ${index}`, id, 0, vocabularySize - 1);
      }
      ids[index] = id;
    }
    return ids;
  });
}
