import type { Stream, TensorHandle } from '@kv/sparse-core';

import { selectTokens } from './operations/select-tokens.js';
import type { SelectTokensRow } from './operations/select-tokens.js';
import { sum } from './sum.js';

/**
 * Capacities that move between the kv heads of a layer, after AdaKV (Feng et al. 2024): `floor` of what a head
 * may keep of its prefix is its own; the rest of all heads goes to those that hold the best scores. Their sum is
 * that of the rows given. Heads whose prefixes differ in length keep the capacities that they have.
 * @param scores f32 `[batch, kvHead, token]` of one batch entry, a prefix long
 * @param floor 0 to 1
 */
export async function moveBudgets(
  stream: Stream,
  scores: TensorHandle<'f32', readonly ['batch', 'kvHead', 'token']>,
  rows: readonly SelectTokensRow[],
  floor: number,
): Promise<readonly SelectTokensRow[]> {
  const { device } = stream;
  const [, kvHeads, prefixTokens] = scores.shape;
  if (rows.some((row) => row.prefixTokens !== prefixTokens)) return rows;
  const budgets = rows.map((row) => Math.min(prefixTokens, Math.max(0, row.capacity - row.windowTokens)));
  const own = budgets.map((budget) => Math.floor(floor * budget));
  const shared = sum(budgets) - sum(own);
  if (shared === 0) return rows;

  // The heads' prefixes one after the other are one row of scores, of which the best are taken.
  const all = { prefixTokens: kvHeads * prefixTokens, windowTokens: 0, capacity: shared, blockTokens: 1 };
  using indices = device.tensor('i32', ['batch', 'kvHead', 'kept'], [1, 1, shared]);
  using counts = device.tensor('i32', ['batch', 'kvHead'], [1, 1]);
  const oneRow = scores.view(['batch', 'kvHead', 'token'], [1, 1, all.prefixTokens]);
  selectTokens(stream, { scores: oneRow, rows: [[all]], rounds: [1], indices, counts });
  const best = await indices.read();

  let left = shared;
  const grown = own.map((budget, head) => {
    const won = countBelow(best, (head + 1) * prefixTokens) - countBelow(best, head * prefixTokens);
    const room = Math.min(won, prefixTokens - budget);
    left -= room;
    return budget + room;
  });
  // What a head has no tokens for goes to the next that have.
  return rows.map((row, head) => {
    const budget = grown[head] ?? 0;
    const more = Math.min(left, prefixTokens - budget);
    left -= more;
    return { ...row, capacity: row.windowTokens + budget + more };
  });
}

/** How many of ascending numbers are below `limit`. */
function countBelow(ascending: Int32Array, limit: number): number {
  let [low, high] = [0, ascending.length];
  while (low < high) {
    const middle = (low + high) >>> 1;
    if ((ascending[middle] ?? limit) < limit) low = middle + 1;
    else high = middle;
  }
  return low;
}
