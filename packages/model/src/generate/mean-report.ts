import type { PrefillReport } from '@kv/sparse-core';

/** What is reported of a layer of a chunk. */
export interface ChunkReport {
  readonly report: PrefillReport | Promise<PrefillReport>;
  /** Pairs of a row of the chunk and a key that it sees. */
  readonly scores: number;
}

/**
 * The mean of what is reported, once all have. Densities count by their chunks' scores, so that theirs is the share of all
 * scores that was computed; that of estimates and bounds is over the reports that have one. Reasons stand once each.
 */
export async function meanReport(chunks: readonly ChunkReport[]): Promise<PrefillReport> {
  const reports = await Promise.all(chunks.map(async ({ report }) => report));
  const sum = (numbers: readonly number[]): number => numbers.reduce((all, number) => all + number, 0);
  const mean = (numbers: readonly (number | undefined)[]): number | undefined => {
    const there = numbers.filter((number) => number !== undefined);
    return there.length === 0 ? undefined : sum(there) / there.length;
  };
  const scores = chunks.map((chunk) => chunk.scores);
  const computed = reports.map(({ density }, index) => density * (scores[index] ?? NaN));
  const reasons = new Set(reports.map(({ fallback }) => fallback).filter((reason) => reason !== undefined));
  return {
    density: sum(computed) / sum(scores),
    estimatedMass: mean(reports.map(({ estimatedMass }) => estimatedMass)),
    errorBound: mean(reports.map(({ errorBound }) => errorBound)),
    fallback: reasons.size === 0 ? undefined : [...reasons].join('; '),
  };
}
