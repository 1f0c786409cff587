import { CapabilityError } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';
import { quantizedBlockBytes } from './quantized-blocks.js';

describe('quantizedBlockBytes', () => {
  it.each([
    { headDim: 64, bits: 8, bytesOfToken: 66 },
    { headDim: 64, bits: 4, bytesOfToken: 34 },
    { headDim: 128, bits: 8, bytesOfToken: 132 },
    { headDim: 128, bits: 4, bytesOfToken: 68 },
    { headDim: 20, bits: 8, bytesOfToken: 33 },
    { headDim: 80, bits: 4, bytesOfToken: 51 },
    { headDim: 64, bits: 3, bytesOfToken: 26 },
    { headDim: 64, bits: 2, bytesOfToken: 18 },
    { headDim: 128, bits: 3, bytesOfToken: 52 },
    { headDim: 128, bits: 2, bytesOfToken: 36 },
    { headDim: 80, bits: 3, bytesOfToken: 51 },
    { headDim: 20, bits: 2, bytesOfToken: 17 },
  ] as const)('counts codes and scales, groups filled up ($headDim dims, $bits bits)', ({ headDim, bits, bytesOfToken }) => {
    expect(quantizedBlockBytes(headDim, bits)).toBe(64 * bytesOfToken);
  });

  it('refuses formats that there are not', () => {
    for (const headDim of [0, -1, 513, 1.5, NaN, '64']) {
      expect(() => quantizedBlockBytes(headDim as never, 8)).toThrow(CapabilityError);
    }
    for (const bits of [1, 5, 16, NaN, undefined]) {
      expect(() => quantizedBlockBytes(64, bits as never)).toThrow(CapabilityError);
    }
  });
});
