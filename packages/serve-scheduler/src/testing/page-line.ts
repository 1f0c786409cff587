import { readText } from './measured-rows.js';

const shown = (value: number): string => value.toLocaleString('en-US', { maximumSignificantDigits: 4 });

/** A line of a table: what is predicted, what was measured, and by how much the first is off. */
export function lineOf(name: string, predicted: number, found: number, digits = 1): string {
  const off = (100 * (predicted / found - 1)).toFixed(digits).replace('-', '−');
  return `| ${name} | ${shown(predicted)} | ${shown(found)} | ${off} %`;
}

/** Lines that the simulator's page lacks. */
export function missingLines(lines: readonly string[]): string[] {
  const page = readText('docs/methods/serve-simulator.md').split('\n');
  return lines.filter((line) => !page.some((each) => each === `${line} |` || each.startsWith(`${line} | `)));
}
