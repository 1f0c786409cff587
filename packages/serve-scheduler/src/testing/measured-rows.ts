import { readFileSync } from 'node:fs';

const root = new URL('../../../../', import.meta.url);

export interface MeasuredRow {
  readonly measure: string;
  readonly result: { readonly median: number };
  readonly reference: { readonly median: number };
  /** Of rows of `plan-blocks`: milliseconds that forgetting blocks takes, which they contain. */
  readonly forgetting: number;
  /** Of steps over two memories: % of what they read that the device lacked. */
  readonly missing: number;
}

const files = new Map<string, readonly MeasuredRow[]>();

/** A row of a file of docs/benchmarks. @throws Error when there is none, or more than one */
export function rowOf(file: string, measure: string): MeasuredRow {
  const rows = files.get(file) ?? (JSON.parse(readText(`docs/benchmarks/${file}`)) as { rows: MeasuredRow[] }).rows;
  files.set(file, rows);
  const found = rows.filter((row) => row.measure === measure);
  const [row] = found;
  if (row === undefined || found.length > 1) throw new Error(`${file} has ${found.length} rows '${measure}'`);
  return row;
}

/** The median of a measured row, in its unit. */
export const measured = (file: string, measure: string): number => rowOf(file, measure).result.median;

/** The median of what was timed beside it. */
export const reference = (file: string, measure: string): number => rowOf(file, measure).reference.median;

/** A file of the repository. */
export const readText = (path: string): string => readFileSync(new URL(path, root), 'utf8');
