import { types } from 'node:util';
import { markAsUntransferable } from 'node:worker_threads';
import { type ElementArray, typedArrayPrototype } from './dtype.js';
import { InvalidValueError } from './errors.js';

/**
 * Keeps the memory of an array where it is: its buffer can no longer be transferred to another thread. A
 * SharedArrayBuffer stays where it is by itself, even if it grows.
 * @throws InvalidValueError when the buffer can be resized, which may take memory away
 */
export function holdInPlace(memory: ElementArray): void {
  // A subclass, or the object itself, may say otherwise.
  const buffer = Reflect.get(typedArrayPrototype, 'buffer', memory) as ArrayBufferLike;
  if (types.isSharedArrayBuffer(buffer)) return;
  if (Reflect.get(ArrayBuffer.prototype, 'resizable', buffer) === true) {
    throw new InvalidValueError(
      'wrap: the array is over a resizable ArrayBuffer, whose memory may go away; use one of fixed length, or a ' +
        'SharedArrayBuffer.',
      { subject: 'wrap', given: memory },
    );
  }
  markAsUntransferable(buffer);
}
