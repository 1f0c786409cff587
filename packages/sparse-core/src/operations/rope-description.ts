import { InvalidValueError } from '../errors.js';
import { show } from '../show.js';
import { expectObject, expectOptions, expectThat } from '../validate.js';

/**
 * Which two dims of a head turn together: `x[i]` and `x[i + pairs]` (`halfSplit`, the layout of
 * safetensors checkpoints), or `x[2i]` and `x[2i + 1]` (`interleaved`).
 */
export type RopeConvention = 'halfSplit' | 'interleaved';

/** Far more than any head has; frequencies are computed at once. */
const mostDims = 65_536;

export const ropeConventions: readonly RopeConvention[] = ['halfSplit', 'interleaved'];

/** How positions beyond the trained range are squeezed into it. */
export type RopeScaling =
  | { readonly kind: 'none' }
  /** Every frequency is divided by `factor`. */
  | { readonly kind: 'linear'; readonly factor: number }
  /**
   * Llama 3.1: a frequency that turns fewer than `lowFrequencyFactor` times in `originalMaxPositions` is
   * divided by `factor`, one that turns more than `highFrequencyFactor` times is kept, those between blended.
   */
  | {
      readonly kind: 'llama3';
      readonly factor: number;
      readonly lowFrequencyFactor: number;
      readonly highFrequencyFactor: number;
      readonly originalMaxPositions: number;
    };

/** How queries and keys are rotated: what `rope` does, and what a method needs to undo it. */
export interface RopeDescription {
  readonly convention: RopeConvention;
  /** `[pair]`, radians a position. */
  readonly inverseFrequencies: Float32Array;
  /** Multiplies every cosine and sine. */
  readonly attentionScale: number;
}

export interface RopeOptions {
  /** The base of the wavelengths. */
  readonly theta: number;
  /** Even. */
  readonly headDim: number;
  /** How many leading dims of a head turn. Default: all. */
  readonly rotaryDim?: number | undefined;
  /** Default: `{ kind: 'none' }`. */
  readonly scaling?: RopeScaling | undefined;
  /** Default: `halfSplit`. */
  readonly convention?: RopeConvention | undefined;
}

/**
 * The rotary embedding of a model: `inverseFrequencies[i] = theta^(-2i / rotaryDim)`, then scaled. Computed
 * in f64 and rounded once.
 * @throws InvalidValueError when an option is out of its domain
 */
export function ropeDescription(options: RopeOptions): RopeDescription {
  expectOptions('ropeDescription', options, { theta: true, headDim: true, rotaryDim: true, scaling: true, convention: true });
  const {
    theta,
    headDim,
    rotaryDim = headDim,
    scaling = { kind: 'none' },
    convention = 'halfSplit',
  } = options;
  expectPositive('theta', theta);
  const validHeadDim = Number.isInteger(headDim) && headDim > 0 && headDim <= mostDims;
  expect('headDim', headDim, validHeadDim, `a whole number from 1 to ${mostDims}`);
  const validRotaryDim =
    Number.isInteger(rotaryDim) && rotaryDim > 0 && rotaryDim % 2 === 0 && rotaryDim <= headDim;
  expect('rotaryDim', rotaryDim, validRotaryDim, `an even number of dims, at most headDim (${headDim})`);
  expect('convention', convention, ropeConventions.includes(convention), ropeConventions.join(' or '));
  const scale = frequencyScaling(scaling);
  const inverseFrequencies = Float32Array.from({ length: rotaryDim / 2 }, (_, pair) =>
    scale(theta ** ((-2 * pair) / rotaryDim)),
  );
  return { convention, inverseFrequencies, attentionScale: 1 };
}

function frequencyScaling(scaling: RopeScaling): (frequency: number) => number {
  expectObject('ropeDescription', 'scaling', scaling);
  switch (scaling.kind) {
    case 'none':
      return (frequency) => frequency;
    case 'linear':
      expectPositive('scaling.factor', scaling.factor);
      return (frequency) => frequency / scaling.factor;
    case 'llama3': {
      const { factor, lowFrequencyFactor, highFrequencyFactor, originalMaxPositions } = scaling;
      const numbers = { factor, lowFrequencyFactor, highFrequencyFactor, originalMaxPositions };
      for (const [name, value] of Object.entries(numbers)) expectPositive(`scaling.${name}`, value);
      const ordered = highFrequencyFactor > lowFrequencyFactor;
      expect(
        'scaling.highFrequencyFactor',
        highFrequencyFactor,
        ordered,
        `more than lowFrequencyFactor (${lowFrequencyFactor})`,
      );
      return (frequency) => {
        const turns = (originalMaxPositions * frequency) / (2 * Math.PI);
        const blend = (turns - lowFrequencyFactor) / (highFrequencyFactor - lowFrequencyFactor);
        const kept = Math.min(1, Math.max(0, blend));
        return kept * frequency + ((1 - kept) * frequency) / factor;
      };
    }
    default: {
      const { kind } = scaling as { kind: unknown };
      throw new InvalidValueError(`ropeDescription: scaling.kind is ${show(kind)}; it must be 'none', 'linear' or 'llama3'.`, {
        subject: 'scaling.kind',
        given: kind,
      });
    }
  }
}

function expectPositive(name: string, given: number): void {
  expect(name, given, Number.isFinite(given) && given > 0, 'a positive number');
}

function expect(name: string, given: unknown, holds: boolean, wanted: string): void {
  expectThat('ropeDescription', name, given, holds, wanted);
}
