import { describe, expect, it } from 'vitest';
import { InvalidValueError } from '../errors.js';
import { unitRoundoff } from '../testing/random.js';
import { ropeDescription, type RopeScaling } from './rope-description.js';

const llama3: RopeScaling = {
  kind: 'llama3',
  factor: 8,
  lowFrequencyFactor: 1,
  highFrequencyFactor: 4,
  originalMaxPositions: 8192,
};
const f32 = Math.fround;

/** The steps of the `transformers` library, each rounded to f32 as there. */
function reference(theta: number, dim: number, scaling: RopeScaling): Float32Array {
  return Float32Array.from({ length: dim / 2 }, (_, pair) => {
    const frequency = f32(1 / f32(theta ** f32((2 * pair) / dim)));
    if (scaling.kind === 'none') return frequency;
    if (scaling.kind === 'linear') return f32(frequency / scaling.factor);
    const wavelength = f32(f32(2 * Math.PI) / frequency);
    const {
      factor,
      lowFrequencyFactor: low,
      highFrequencyFactor: high,
      originalMaxPositions: trained,
    } = scaling;
    if (wavelength < trained / high) return frequency;
    if (wavelength > trained / low) return f32(frequency / factor);
    const smooth = f32(f32(f32(trained / wavelength) - low) / f32(high - low));
    return f32(f32(f32(f32(1 - smooth) * frequency) / factor) + f32(smooth * frequency));
  });
}

describe('ropeDescription', () => {
  it.each([
    { theta: 10_000, headDim: 64, scaling: { kind: 'none' } },
    { theta: 1_000_000, headDim: 128, scaling: { kind: 'none' } },
    { theta: 10_000, headDim: 128, scaling: { kind: 'linear', factor: 3 } },
    { theta: 500_000, headDim: 128, scaling: llama3 },
    { theta: 500_000, headDim: 32, scaling: { ...llama3, originalMaxPositions: 64 } },
  ] as const)(
    'gives the frequencies of transformers: $scaling.kind, theta $theta, dim $headDim',
    (options) => {
      const { inverseFrequencies } = ropeDescription(options);
      const expected = reference(options.theta, options.headDim, options.scaling);
      expect(inverseFrequencies).toHaveLength(expected.length);
      expected.forEach((wanted, pair) => {
        // The reference rounds at most nine times, and the wavelength's two roundings are magnified by
        // at most trained / wavelength / (high - low) <= 4/3 in the blend; these are rounded once.
        const difference = Math.abs((inverseFrequencies[pair] ?? NaN) - wanted);
        expect(difference).toBeLessThanOrEqual(13 * unitRoundoff.f32 * wanted);
      });
    },
  );

  it('keeps the fastest frequencies of llama3 scaling and divides the slowest by the factor', () => {
    const plain = ropeDescription({ theta: 500_000, headDim: 128 }).inverseFrequencies;
    const scaled = ropeDescription({ theta: 500_000, headDim: 128, scaling: llama3 }).inverseFrequencies;
    expect(scaled.slice(0, 20)).toEqual(plain.slice(0, 20));
    expect(scaled.slice(50)).toEqual(plain.slice(50).map((frequency) => frequency / 8));
    const between = scaled.slice(29, 35).map((frequency, index) => (plain[29 + index] ?? NaN) / frequency);
    for (const ratio of between) {
      expect(ratio).toBeGreaterThan(1);
      expect(ratio).toBeLessThan(8);
    }
  });

  it('turns only the leading dims when asked to', () => {
    const { inverseFrequencies } = ropeDescription({ theta: 10_000, headDim: 80, rotaryDim: 4 });
    expect(inverseFrequencies).toEqual(Float32Array.of(1, 0.01));
  });

  it.each([
    { theta: 0 },
    { theta: NaN },
    { headDim: 63 },
    { headDim: -2 },
    { rotaryDim: 66 },
    { convention: 'spiral' as never },
    { scaling: { kind: 'linear', factor: 0 } as const },
    { scaling: { kind: 'yarn' } as never },
    { scaling: { ...llama3, highFrequencyFactor: 1 } },
    { scaling: { ...llama3, originalMaxPositions: undefined as never } },
  ])('refuses %o', (bad) => {
    expect(() => ropeDescription({ theta: 10_000, headDim: 64, ...bad })).toThrow(InvalidValueError);
  });
});
