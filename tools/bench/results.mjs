// Rows of docs/benchmarks/*.json: how a figure is summed up, stamped and kept.
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { arch, cpus, loadavg, totalmem } from 'node:os';
import { fileURLToPath } from 'node:url';

export const RESULTS_FOLDER = fileURLToPath(new URL('../../docs/benchmarks/', import.meta.url));

/** Median and spread of samples: `{ median, low, high, samples }`. */
export function summarise(samples) {
  const sorted = samples.toSorted((a, b) => a - b);
  const middle = sorted.length >> 1;
  const median = sorted.length % 2 === 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  return { median, low: sorted[0], high: sorted.at(-1), samples: sorted.length };
}

/** The processor by what tells its generation, such as "AMD EPYC, family 26, model 2, 2.6 GHz". */
export function processor() {
  const info = existsSync('/proc/cpuinfo') ? readFileSync('/proc/cpuinfo', 'utf8') : '';
  const of = (name) => new RegExp(`^${name}\\s*: ([\\d.]+)$`, 'm').exec(info)?.[1];
  const [family, model, megahertz] = ['cpu family', 'model', 'cpu MHz'].map(of);
  const generation = model === undefined ? '' : `, family ${family}, model ${model}`;
  const clock = megahertz === undefined ? '' : `, ${(megahertz / 1000).toFixed(1)} GHz`;
  return `${cpus()[0].model.trim()}${generation}${clock}`;
}

/** Where and when a row was measured. */
export function stamp() {
  return {
    date: new Date().toISOString().slice(0, 10),
    machine: `${processor()}, ${cpus().length} cores, ${Math.round(totalmem() / 2 ** 30)} GiB, ${arch()}`,
    node: process.version,
    loadAverage: Number(loadavg()[0].toFixed(2)),
  };
}

/**
 * Puts `rows` into docs/benchmarks/`name`.json in place of the rows with the same `measure`; README.md beside
 * this file says what a row holds.
 */
export function keepRows(name, title, rows) {
  const path = `${RESULTS_FOLDER}${name}.json`;
  const kept = existsSync(path) ? JSON.parse(readFileSync(path, 'utf8')).rows : [];
  const byMeasure = new Map([...kept, ...rows].map((row) => [row.measure, row]));
  mkdirSync(RESULTS_FOLDER, { recursive: true });
  writeFileSync(path, JSON.stringify({ title, rows: [...byMeasure.values()] }, null, 2) + '\n');
}
