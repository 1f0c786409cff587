import { Buffer } from 'node:buffer';
import { expect } from 'vitest';

/** Element by element, large arrays would take most of a test's time to compare. */
function sameBytes(one: unknown, other: unknown): true | undefined {
  if (!ArrayBuffer.isView(one) || !ArrayBuffer.isView(other) || one.constructor !== other.constructor) return undefined;
  const bytesOf = ({ buffer, byteOffset, byteLength }: ArrayBufferView) => new Uint8Array(buffer, byteOffset, byteLength);
  return Buffer.compare(bytesOf(one), bytesOf(other)) === 0 || undefined;
}

expect.addEqualityTesters([sameBytes]);
