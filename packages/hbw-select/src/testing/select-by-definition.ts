import type { SelectTokensRow } from '../operations/select-tokens.js';
import type { ScorePooling, SelectTokensOptions } from '../select-options.js';

type Better = (a: number, b: number) => number;

function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}

/**
 * Pooling as PyTorch's with stride 1. The average has zeros around it, so that all tokens have the same divisor:
 * it orders nothing, and without it sums stay exact.
 */
function pool(scores: readonly number[], { kind, tokens }: ScorePooling): number[] {
  const reach = (tokens - 1) / 2;
  return scores.map((_, token) => {
    const near = scores.slice(Math.max(0, token - reach), token + reach + 1);
    return kind === 'max' ? Math.max(...near) : sum(near);
  });
}

/** The blocks of one round that are not in `taken` yet. */
function takeRound(blocks: number, groups: number, quota: number, taken: ReadonlySet<number>, better: Better): number[] {
  const group = Math.min(groups, blocks);
  const edge = (index: number) => Math.floor((index * blocks) / group);
  const chosen = new Set<number>();
  const free = (first: number, last: number) =>
    Array.from({ length: last - first }, (_, index) => first + index)
      .filter((block) => !taken.has(block) && !chosen.has(block))
      .sort(better);
  for (let index = 0; index < group; index++) {
    for (const block of free(edge(index), edge(index + 1)).slice(0, Math.floor(quota / group))) chosen.add(block);
  }
  const bestOfGroups = Array.from({ length: group }, (_, index) => free(edge(index), edge(index + 1))[0])
    .filter((block) => block !== undefined)
    .sort(better);
  for (const block of bestOfGroups.slice(0, quota - chosen.size)) chosen.add(block);
  for (const block of free(0, blocks).slice(0, quota - chosen.size)) chosen.add(block);
  return [...chosen];
}

/**
 * What `selectTokens` keeps of one row, written from the definition and in no hurry: HBW-KV Eq. 5 to 7 and
 * section 3.2.3, for scores whose sums are exact.
 */
export function selectByDefinition(
  scores: readonly number[],
  { windowTokens, capacity, blockTokens }: SelectTokensRow,
  { rounds = [1, 8], dedup, remainder, sinkTokens = 0, pooling }: SelectTokensOptions,
): number[] {
  const all = Array.from({ length: scores.length + windowTokens }, (_, token) => token);
  const budget = Math.min(scores.length, Math.max(0, capacity - windowTokens));
  const sinks = Math.min(sinkTokens, budget);
  const kept = new Set<number>([...all.slice(0, sinks), ...all.slice(scores.length)]);
  if (budget === scores.length) return all;

  const candidates = (pooling ? pool(scores, pooling) : scores).slice(sinks);
  const wanted = budget - sinks;
  const length = Math.min(blockTokens, wanted);
  if (length > 0) {
    const blocks = Math.ceil(candidates.length / length);
    const members = (block: number) => candidates.slice(block * length, (block + 1) * length);
    const means = Array.from({ length: blocks }, (_, block) => sum(members(block)) / members(block).length);
    const better: Better = (a, b) => (means[b] ?? NaN) - (means[a] ?? NaN) || a - b;
    const budgetBlocks = Math.min(Math.floor(wanted / length), blocks);
    const taken = new Set<number>();
    let carried = 0;
    rounds.forEach((groups, round) => {
      const quota = Math.floor(budgetBlocks / rounds.length) + (round < budgetBlocks % rounds.length ? 1 : 0);
      const before = dedup === 'union' ? new Set<number>() : taken;
      const chosen = takeRound(blocks, groups, quota + carried, before, better);
      carried = dedup === 'union' ? 0 : quota + carried - chosen.length;
      for (const block of chosen) taken.add(block);
    });
    for (const block of taken) members(block).forEach((_, index) => kept.add(sinks + block * length + index));
  }
  if (remainder !== 'drop') {
    const rest = all.slice(sinks, scores.length).filter((token) => !kept.has(token));
    rest.sort((a, b) => (candidates[b - sinks] ?? NaN) - (candidates[a - sinks] ?? NaN) || a - b);
    for (const token of rest.slice(0, budget + windowTokens - kept.size)) kept.add(token);
  }
  return [...kept].sort((a, b) => a - b);
}
