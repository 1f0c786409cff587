import { InvalidValueError } from '@kv/sparse-core';

import { expectThat } from './expect.js';

/**
 * What each kv head keeps, as a multiple of the capacity, `[layer][kvHead]`. Heads that look far back deserve more
 * than heads that look at what is near; shares whose mean is 1 move budgets between heads without adding to them.
 */
export type HeadShares = readonly (readonly number[])[];

/** @throws InvalidValueError unless all shares are positive */
export function expectHeadShares(shares: HeadShares): void {
  for (const share of shares.flat()) expectThat(share > 0 && share < Infinity, 'headShares', share, 'positive');
}

/** @throws InvalidValueError when the kv head has no share */
export function headShare(shares: HeadShares | undefined, layer: number, kvHead: number): number {
  if (shares === undefined) return 1;
  const share = shares[layer]?.[kvHead];
  if (share !== undefined) return share;
  throw new InvalidValueError(`headShares has none for kv head ${kvHead} of layer ${layer}; give one for each.`, {
    subject: 'headShares',
    given: shares.map((layerShares) => layerShares.length),
    wanted: [layer + 1, kvHead + 1],
  });
}
