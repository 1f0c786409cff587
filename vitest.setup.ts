import { Buffer } from 'node:buffer';
import { expect } from 'vitest';

/** Element by element, large arrays would take most of a test's time to compare. */
function sameBytes(one: unknown, other: unknown): true | undefined {
  if (!ArrayBuffer.isView(one) || !ArrayBuffer.isView(other) || one.constructor !== other.constructor) return undefined;
  const bytesOf = ({ buffer, byteOffset, byteLength }: ArrayBufferView) => new Uint8Array(buffer, byteOffset, byteLength);
  return Buffer.compare(bytesOf(one), bytesOf(other)) === 0 || sameNumbers(one, other) || undefined;
}

/** A NaN equals those of other bits. */
function sameNumbers(one: ArrayBufferView, other: ArrayBufferView): boolean {
  if (!(one instanceof Float64Array) || !(other instanceof Float64Array) || one.length !== other.length) return false;
  return one.every((x, index) => Object.is(x, other[index]));
}

expect.addEqualityTesters([sameBytes]);
