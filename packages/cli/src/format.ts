// As a whole: an old Node has no `styleText`, and must come as far as the line that refuses it.
import * as util from 'node:util';

const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

/** `46.9 MiB` */
export function formatBytes(bytes: number): string {
  const power = bytes < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(bytes) / 10));
  const digits = power === 0 ? 0 : 1;
  return `${(bytes / 1024 ** power).toFixed(digits)} ${units[power] ?? ''}`;
}

/** `11,450` */
export function formatCount(count: number): string {
  return count.toLocaleString('en-US');
}

/** `3.21 s`, or `85 ms` below a second */
export function formatSeconds(seconds: number): string {
  return seconds < 1 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(2)} s`;
}

/** `45 s` or `3 min`: a time that is not known better than that. */
export function formatRoughly(seconds: number): string {
  if (seconds < 10) return `${Math.max(1, Math.round(seconds))} s`;
  return seconds < 90 ? `${5 * Math.round(seconds / 5)} s` : `${Math.round(seconds / 60)} min`;
}

/** `3,812`, or `38.1` where digits behind the point say something */
export function formatRate(perSecond: number): string {
  return perSecond < 100 ? perSecond.toFixed(1) : formatCount(Math.round(perSecond));
}

/** `25.8 %`, `100 %` */
export function formatShare(share: number): string {
  return `${Number((100 * share).toFixed(1))} %`;
}

const nameWidth = 12;

/** Lines of names and values, the values below one another. A name may be left empty. */
export function formatFacts(facts: readonly (readonly [name: string, value: string])[]): string {
  return facts.map(([name, value]) => `${name.padEnd(nameWidth)}${value}\n`).join('');
}

/** Text with colours and weights, for `TextOutput.writeStyled`, which knows whether they can be shown. */
export function styled(style: Parameters<typeof util.styleText>[0], text: string): string {
  return util.styleText(style, text, { validateStream: false });
}
