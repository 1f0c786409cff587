import { InvalidValueError } from '@kv/sparse-core';
import { expectThat, listOf } from '@kv/sparse-core/native';

import { sum } from './sum.js';

/**
 * How much of the whole budget each kv head gets, `[layer][kvHead]`, in any unit: heads that look far back deserve
 * more than heads that look at what is near.
 */
export type HeadShares = readonly (readonly number[])[];

/** Layers, and heads of a layer. */
const mostEntries = 65_536;

/** @throws InvalidValueError unless all shares are positive */
export function expectHeadShares(shares: HeadShares): void {
  for (const heads of listOf('select', 'headShares', shares, mostEntries)) {
    for (const share of listOf('select', 'headShares', heads, mostEntries)) {
      expectThat('select', 'headShares', share, Number.isFinite(share) && share > 0, 'positive');
    }
  }
}

/**
 * The tokens that a kv head keeps when the heads of all layers share what an equal split gives each. Budgets move in
 * whole blocks of the store and each head has one at least, so that the sum stays the same in tokens and in bytes.
 * @param capacity tokens of a head in an equal split
 * @param storeBlock tokens of a block of the store
 * @throws InvalidValueError when the kv head has no share
 */
export function sharedCapacity(
  shares: HeadShares,
  { layer, kvHead }: { readonly layer: number; readonly kvHead: number },
  capacity: number,
  storeBlock: number,
): number {
  if (shares[layer]?.[kvHead] === undefined) {
    throw new InvalidValueError(`headShares has none for kv head ${kvHead} of layer ${layer}; give one for each.`, {
      subject: 'headShares',
      given: shares.map((heads) => heads.length),
      wanted: [layer + 1, kvHead + 1],
    });
  }
  const all = shares.flat();
  const blocks = Math.ceil(capacity / storeBlock);
  const own = apportion(all, blocks * all.length)[shares.slice(0, layer).flat().length + kvHead] ?? blocks;
  return capacity + (own - blocks) * storeBlock;
}

/** Divides `blocks` by shares, at least one each, the largest remainders rounded up. */
function apportion(shares: readonly number[], blocks: number): number[] {
  const total = sum(shares);
  const beyondFirst = shares.map((share) => Math.max(0, (share / total) * blocks - 1));
  const scale = (blocks - shares.length) / Math.max(sum(beyondFirst), Number.MIN_VALUE);
  const ideal = beyondFirst.map((more) => 1 + more * scale);
  const given = ideal.map(Math.floor);
  const order = [...shares.keys()].sort((one, other) => remainder(ideal, other) - remainder(ideal, one) || one - other);
  for (const head of order.slice(0, blocks - sum(given))) given[head] = (given[head] ?? 0) + 1;
  return given;
}

function remainder(numbers: readonly number[], index: number): number {
  return (numbers[index] ?? 0) % 1;
}
