import type { PrefillReport } from '@kv/sparse-core';

/** The mean of what was reported; of estimates and bounds, over the reports that have one. Reasons stand once each. */
export function meanReport(reports: readonly PrefillReport[]): PrefillReport {
  const mean = (numbers: readonly (number | undefined)[]): number | undefined => {
    const there = numbers.filter((number) => number !== undefined);
    return there.length === 0 ? undefined : there.reduce((sum, number) => sum + number, 0) / there.length;
  };
  const reasons = new Set(reports.map(({ fallback }) => fallback).filter((reason) => reason !== undefined));
  return {
    density: mean(reports.map(({ density }) => density)) ?? 1,
    estimatedMass: mean(reports.map(({ estimatedMass }) => estimatedMass)),
    errorBound: mean(reports.map(({ errorBound }) => errorBound)),
    fallback: reasons.size === 0 ? undefined : [...reasons].join('; '),
  };
}
