// What stores.mjs wrote, summed up.
import { readFileSync } from 'node:fs';

export function readResults(files) {
  const lines = files.flatMap((file) => readFileSync(file, 'utf8').split('\n').filter(Boolean));
  return lines.map((line) => JSON.parse(line));
}

/** The results of the items that were measured under every one of some settings. */
export function ofCommonItems(results, settings) {
  const wanted = results.filter(({ setting }) => settings.includes(setting));
  return [...groupBy(wanted, ({ item }) => item).values()].filter(({ length }) => length === settings.length).flat();
}

export function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) groups.set(keyOf(item), [...(groups.get(keyOf(item)) ?? []), item]);
  return groups;
}

export const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
export const mean = (numbers) => sum(numbers) / numbers.length;
export const round = (number, digits) => Number(number.toFixed(digits));

/** The mean of a sample and its standard error. */
export function estimate(numbers) {
  const middle = mean(numbers);
  const variance = sum(numbers.map((number) => (number - middle) ** 2)) / (numbers.length - 1);
  return { mean: middle, error: Math.sqrt(variance / numbers.length), samples: numbers.length };
}

/** The share of right answers in %, and its standard error: the mean over tasks and lengths, each of which counts the same. */
export function percentOf(answers) {
  const strata = [...groupBy(answers, ({ task, length }) => `${task} ${length}`).values()].map((some) =>
    estimate(some.map(({ right }) => 100 * Number(right))),
  );
  return {
    mean: mean(strata.map((stratum) => stratum.mean)),
    error: Math.sqrt(sum(strata.map(({ error }) => error ** 2))) / strata.length,
    samples: answers.length,
  };
}

/** The row's figures of right answers: over all tasks, and the worst and the best of `ofTasks`. */
export const answerFigures = (all, ofTasks) => ({
  median: round(all.mean, 1),
  low: round(Math.min(...ofTasks.map((task) => task.mean)), 1),
  high: round(Math.max(...ofTasks.map((task) => task.mean)), 1),
  samples: all.samples,
});
