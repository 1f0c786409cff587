import type { Device } from '@kv/sparse-core';
import { DescendingSlots, type Random } from '@kv/sparse-core/testing';
import { blockTokens } from '../quantized-blocks.js';

export interface ScoredSizes {
  /** Rows of each batch entry. */
  readonly rows: readonly number[];
  /** Tokens of each batch entry and kv head. */
  readonly tokens: readonly (readonly number[])[];
  readonly kvHeads: number;
  /** Query heads of each kv head. */
  readonly group: number;
  /** Room of a list. */
  readonly chosen: number;
  /** A score, of anything that is no token's too. */
  readonly score: (row: number, queryHead: number, token: number) => number;
}

/** Scores of the tokens of several slots, in descending order, whose blocks of values lie in random order. */
export function scoredTokens(device: Device, random: Random, sizes: ScoredSizes) {
  const { rows, tokens, kvHeads, group, chosen, score } = sizes;
  const batch = rows.length;
  const queryHeads = kvHeads * group;
  const key = Math.max(1, ...tokens.flat());
  const width = Math.ceil(key / blockTokens);
  const sequences = new DescendingSlots(rows, tokens, kvHeads);
  const starts = sequences.queryStart;
  const all = (starts.at(-1) ?? NaN) + 1; // the last row belongs to no entry
  const blocks = random.permutation(batch * kvHeads * width + 3).slice(3);
  const scores = Float32Array.from({ length: all * queryHeads * key }, (_, index) =>
    score(Math.floor(index / (queryHeads * key)), Math.floor(index / key) % queryHeads, index % key),
  );
  const lists = all * kvHeads;
  return {
    arguments: {
      scores: device.tensor('f32', ['token', 'queryHead', 'key'], [all, queryHeads, key], scores),
      blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [batch, kvHeads, width], blocks),
      ...sequences.place(device),
      valueBlocks: batch * kvHeads * width + 3,
      valueRows: device.tensor('i32', ['token', 'kvHead', 'chosen'], [all, kvHeads, chosen], new Int32Array(lists * chosen).fill(-7)),
      weights: device.tensor('f32', ['token', 'kvHead', 'chosen', 'groupHead'], [all, kvHeads, chosen, group], new Float32Array(lists * chosen * group)),
      counts: device.tensor('i32', ['token', 'kvHead'], [all, kvHeads], new Int32Array(lists).fill(-7)),
      logSumExp: device.tensor('f32', ['token', 'queryHead'], [all, queryHeads], new Float32Array(all * queryHeads)),
    },
    rows: all - 1,
    entryOf: (row: number) => starts.findLastIndex((start) => start <= row),
    tokensOf: (entry: number, kvHead: number) => tokens[entry]?.[kvHead] ?? NaN,
    /** As f32. */
    score: (row: number, queryHead: number, token: number) => scores[(row * queryHeads + queryHead) * key + token] ?? NaN,
    /** The row of the pool of values. */
    valueRow(entry: number, kvHead: number, token: number): number {
      const block = blocks[sequences.tableRow(entry, kvHead) * width + Math.floor(token / blockTokens)] ?? NaN;
      return block * blockTokens + (token % blockTokens);
    },
  };
}

export type ScoredTokens = ReturnType<typeof scoredTokens>;
