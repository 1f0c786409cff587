import type { RopeDescription } from '@kv/sparse-core';

/** The two places of a head that pair `pair` turns. */
function placesOf({ convention, inverseFrequencies: { length } }: RopeDescription, pair: number): [number, number] {
  return convention === 'halfSplit' ? [pair, pair + length] : [2 * pair, 2 * pair + 1];
}

/** A row as `rope` rotates it at a position, in float64. */
export function rotate(rope: RopeDescription, row: ArrayLike<number>, position: number): Float64Array {
  const rotated = Float64Array.from(row);
  rope.inverseFrequencies.forEach((frequency, pair) => {
    const [first, second] = placesOf(rope, pair);
    const [a, b] = [row[first] ?? NaN, row[second] ?? NaN];
    const [cosine, sine] = [Math.cos(position * frequency), Math.sin(position * frequency)];
    rotated[first] = rope.attentionScale * (a * cosine - b * sine);
    rotated[second] = rope.attentionScale * (b * cosine + a * sine);
  });
  return rotated;
}

/** Algorithm 1, line 2: the row before it was rotated. */
export function unrotate(rope: RopeDescription, row: ArrayLike<number>, position: number): Float64Array {
  return rotate({ ...rope, attentionScale: 1 / rope.attentionScale }, row, -position);
}

/** r of the paper: `[cosines of the pairs, sines of the pairs]` of the angle of a key `lag` tokens before its query. */
export function relativeAngles({ inverseFrequencies }: RopeDescription, lag: number): Float64Array {
  const pairs = inverseFrequencies.length;
  const angles = new Float64Array(2 * pairs);
  for (let pair = 0; pair < pairs; pair++) {
    const angle = -lag * (inverseFrequencies[pair] ?? NaN);
    angles[pair] = Math.cos(angle);
    angles[pairs + pair] = Math.sin(angle);
  }
  return angles;
}

/** The mean of `relativeAngles` over the lags from `first` to `last`, in closed form. */
export function meanRelativeAngles({ inverseFrequencies }: RopeDescription, first: number, last: number): Float64Array {
  const pairs = inverseFrequencies.length;
  const count = last - first + 1;
  const means = new Float64Array(2 * pairs);
  for (let pair = 0; pair < pairs; pair++) {
    const half = (inverseFrequencies[pair] ?? NaN) / 2;
    const size = Math.sin(half) === 0 ? 1 : Math.sin(count * half) / (count * Math.sin(half));
    const angle = -(first + last) * half;
    means[pair] = size * Math.cos(angle);
    means[pairs + pair] = size * Math.sin(angle);
  }
  return means;
}
