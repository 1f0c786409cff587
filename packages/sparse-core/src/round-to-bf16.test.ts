import { describe, expect, it } from 'vitest';

import { roundToBf16 } from './round-to-bf16.js';
import { Float16 } from './testing/float16.js';

/** The f32 that has these 32 bits. */
function fromBits(bits: number): number {
  return new Float32Array(Uint32Array.of(bits).buffer)[0] ?? NaN;
}

describe('roundToBf16', () => {
  it('leaves every bf16 as it is', () => {
    const wrong = Array.from({ length: 2 ** 16 }, (_, bits) => Float16.bfloatToNumber(bits)).filter(
      (value) => !Object.is(roundToBf16(value), value),
    );
    expect(wrong).toEqual([]);
  });

  it('takes the nearest of two neighbours, and of two as near the even one', () => {
    for (let upper = 0; upper < 0x7f80; upper += 1) {
      const [below, above] = [fromBits(upper << 16), fromBits((upper + 1) << 16)];
      const even = upper % 2 === 0 ? below : above;
      const given = [0x7fff, 0x8000, 0x8001].map((rest) => fromBits((upper << 16) + rest));
      expect([upper, ...given.map(roundToBf16)]).toEqual([upper, below, even, above]);
      expect([upper, ...given.map((value) => roundToBf16(-value))]).toEqual([upper, -below, -even, -above]);
    }
  });
});
