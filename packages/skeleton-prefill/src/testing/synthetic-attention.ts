import type { RopeDescription } from '@kv/sparse-core';
import type { Random } from '@kv/sparse-core/testing';

import type { AttentionProblem } from './decompose-by-definition.js';
import { rotate } from './rotations.js';

export interface SyntheticSizes {
  readonly tokens: number;
  /** At least two more than the dims that turn. */
  readonly dim: number;
  readonly sinkTokens: number;
}

/**
 * Queries and keys whose logits are a slash, a vertical and a horizontal part exactly: the dims that turn are the same
 * for all tokens, the others of all queries the same but for one, which adds a number of its own to each row. Keys
 * drift, so that their running mean moves, and the first ones are sinks.
 */
export function syntheticAttention(random: Random, rope: RopeDescription, sizes: SyntheticSizes): AttentionProblem {
  const { tokens, dim, sinkTokens } = sizes;
  const turning = 2 * rope.inverseFrequencies.length;
  const normals = (length: number, scale: number) => Array.from({ length }, () => scale * random.normal());
  const [queryTurning, keyTurning] = [normals(turning, 1.5), normals(turning, 1.5)];
  const fixed = normals(dim - turning - 1, 1);
  const length = Math.hypot(...fixed);
  const queries: Float64Array[] = [];
  const keys: Float64Array[] = [];
  for (let token = 0; token < tokens; token++) {
    const drift = (2 * token) / tokens - 1;
    const free = normals(fixed.length, 0.8).map((x, index) => {
      return x + drift + (token < sinkTokens ? (6 * (fixed[index] ?? NaN)) / length : 0);
    });
    queries.push(rotate(rope, [...queryTurning, ...fixed, 2 * random.normal()], token));
    keys.push(rotate(rope, [...keyTurning, ...free, 1], token));
  }
  return { queries, keys, rope, scale: dim ** -0.5 };
}
