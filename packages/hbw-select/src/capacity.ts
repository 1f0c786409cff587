import { InvalidValueError } from '@kv/sparse-core';
import { expectThat, listOf } from '@kv/sparse-core/native';

import { expectWhole } from './expect.js';

const mostLayers = 65_536;

/** One value for all layers, a list with one for each, or a function of the layer's index. */
export type PerLayer<T> = T | readonly T[] | ((layer: number) => T);

/** How many tokens a layer keeps of each kv head when a prompt ends. */
export type Capacity =
  | {
      /** Tokens. A sequence that holds fewer is kept whole. */
      readonly capacity: PerLayer<number>;
      readonly keepRatio?: undefined;
    }
  | {
      readonly capacity?: undefined;
      /**
       * Share of all tokens that the sequence has had, over turns, more than 0 and at most 1; rounded down to whole
       * tokens, at least one.
       */
      readonly keepRatio: PerLayer<number>;
    };

/**
 * The tokens to keep in a layer of a sequence that has had `tokens`. Values that are given are checked now, those of functions when
 * they are asked for.
 * @throws InvalidValueError
 */
export function capacityOf({ capacity, keepRatio }: Capacity): (layer: number, tokens: number) => number {
  if ((capacity === undefined) === (keepRatio === undefined)) {
    throw new InvalidValueError('Give either capacity, in tokens, or keepRatio, a share of the prompt.', {
      subject: 'capacity',
      given: { capacity, keepRatio },
    });
  }
  if (capacity !== undefined) {
    const ofLayer = perLayer('capacity', capacity, (given) => expectWhole('select', 'capacity', given, 1));
    return (layer) => ofLayer(layer);
  }
  const ofLayer = perLayer('keepRatio', keepRatio, (given) =>
    expectThat('select', 'keepRatio', given, Number.isFinite(given) && given > 0 && given <= 1, 'more than 0 and at most 1'),
  );
  return (layer, tokens) => Math.max(1, Math.floor(ofLayer(layer) * tokens));
}

function perLayer(
  name: string,
  given: PerLayer<number>,
  check: (value: number) => void,
): (layer: number) => number {
  if (typeof given === 'function') {
    return (layer) => {
      const value = given(layer);
      check(value);
      return value;
    };
  }
  const list = typeof given === 'object' ? listOf('select', name, given, mostLayers) : undefined;
  for (const value of list ?? [given as number]) check(value);
  return (layer) => {
    const value = list === undefined ? (given as number) : list[layer];
    if (value !== undefined) return value;
    throw new InvalidValueError(`${name} has ${list?.length ?? 0} entries; layer ${layer} needs one of its own.`, {
      subject: name,
      given: list?.length,
      wanted: layer + 1,
    });
  };
}
