import { CapabilityError } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';
import { codedBlockBytes } from './coded-keys.js';

describe('codedBlockBytes', () => {
  it.each([
    { groups: 64, codeBits: 13, bytesOfToken: 104 },
    { groups: 32, codeBits: 13, bytesOfToken: 52 },
    { groups: 16, codeBits: 16, bytesOfToken: 32 },
    { groups: 20, codeBits: 12, bytesOfToken: 30 },
    { groups: 7, codeBits: 3, bytesOfToken: 3 },
    { groups: 1, codeBits: 1, bytesOfToken: 0.5 },
  ])('counts codes, groups filled up to four, and what says which tokens have none ($groups groups of $codeBits bits)', ({ groups, codeBits, bytesOfToken }) => {
    expect(codedBlockBytes(groups, codeBits)).toBe(64 * bytesOfToken + 8);
  });

  it('refuses formats that there are not', () => {
    for (const groups of [0, -4, 1.5, NaN, '64']) {
      expect(() => codedBlockBytes(groups as never, 13)).toThrow(CapabilityError);
    }
    for (const bits of [0, 17, 12.5, NaN, undefined]) {
      expect(() => codedBlockBytes(64, bits as never)).toThrow(CapabilityError);
    }
  });
});
