import { expectThat } from '@kv/sparse-core/native';

import { expectCount, positionsOf } from '../expect-given.js';
import { sum } from './numbers.js';

const defaultBins = 64;
const mostBins = 4096;

/**
 * How evenly kept positions cover a text: `H = −Σ_b p_b ln p_b / ln B`, p_b the share of kept positions with
 * `⌊B i / tokens⌋ = b`; 1 is even, 0 is one bin. Compare selections of equal block size and number only: keeping longer
 * runs lowers it by itself. Several heads are pooled by giving all their positions.
 * @throws InvalidValueError unless positions are whole numbers below `tokens`, and bins 1 to 4096
 */
export function indexEntropy(kept: Iterable<number>, tokens: number, bins = defaultBins): number {
  return -sum(shares(kept, tokens, bins).map((share) => (share === 0 ? 0 : share * Math.log(share)))) / Math.log(bins);
}

/**
 * The share of bins that hold a kept position.
 * @throws InvalidValueError unless positions are whole numbers below `tokens`, and bins 1 to 4096
 */
export function indexCoverage(kept: Iterable<number>, tokens: number, bins = defaultBins): number {
  return shares(kept, tokens, bins).filter((share) => share > 0).length / bins;
}

/**
 * `Σ_{b,b'} |p_b − p_b'| / (2B)`: 0 is even, near 1 is one bin.
 * @throws InvalidValueError unless positions are whole numbers below `tokens`, and bins 1 to 4096
 */
export function indexGini(kept: Iterable<number>, tokens: number, bins = defaultBins): number {
  const all = shares(kept, tokens, bins);
  return sum(all.map((one) => sum(all.map((other) => Math.abs(one - other))))) / (2 * bins);
}

/**
 * The longest run of dropped tokens as a share of the text.
 * @param kept ascending
 * @throws InvalidValueError unless positions ascend, whole numbers below `tokens`
 */
export function largestGap(kept: readonly number[], tokens: number): number {
  expectCount('largestGap', 'tokens', tokens);
  const positions = positionsOf('largestGap', kept, tokens);
  const ascends = positions.every((position, index) => position > (positions[index - 1] ?? -1));
  expectThat('largestGap', 'kept', positions, ascends, 'ascending positions');
  const gaps = [...positions, tokens].map((position, index) => position - (positions[index - 1] ?? -1) - 1);
  return Math.max(...gaps) / tokens;
}

function shares(kept: Iterable<number>, tokens: number, bins: number): number[] {
  const what = 'the spread of positions';
  expectCount(what, 'tokens', tokens);
  const isCount = Number.isInteger(bins) && bins > 0 && bins <= mostBins;
  expectThat(what, 'bins', bins, isCount, `a whole number from 1 to ${mostBins}`);
  const counts = new Array<number>(bins).fill(0);
  let total = 0;
  for (const position of positionsOf(what, kept, tokens)) {
    const bin = Math.floor((bins * position) / tokens);
    counts[bin] = (counts[bin] ?? 0) + 1;
    total += 1;
  }
  return counts.map((count) => count / total);
}
