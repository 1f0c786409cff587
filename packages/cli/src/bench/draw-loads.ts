import { drawPanels } from '../draw-panels.js';
import type { Panel } from '../draw-panels.js';
import { formatCount } from '../format.js';
import type { MeasuredLoad } from './measure-load.js';

const panels: readonly (Pick<Panel, 'title'> & { readonly value: (load: MeasuredLoad) => number })[] = [
  { title: 'first token, ms', value: ({ firstToken }) => firstToken },
  { title: 'between tokens, ms', value: ({ betweenTokens = NaN }) => betweenTokens },
  { title: 'tokens/s', value: ({ tokensPerSecond }) => tokensPerSecond },
  { title: 'blocks loaded, % of those read', value: ({ loadedShare = NaN }) => 100 * loadedShare },
  { title: 'KV cache on the device, MiB', value: ({ kvBytes }) => (kvBytes?.device ?? NaN) / 2 ** 20 },
];

/** Loads as an SVG picture: charts by the number of requests, with a series for each policy. */
export function drawLoads(loads: readonly MeasuredLoad[], where: string): string {
  const policies = [...new Set(loads.map(({ policy }) => policy))];
  const requests = [...new Set(loads.map((load) => load.requests))];
  const series = policies.map((name) => ({ name, kind: 'measured' as const }));
  return drawPanels(
    where,
    panels.map(({ title, value }) => {
      const of = (name: string, count: number): number => {
        const load = loads.find(({ policy, requests: own }) => policy === name && own === count);
        return load ? value(load) : NaN;
      };
      const rows = requests.map((count) => ({ label: formatCount(count), values: policies.map((name) => of(name, count)) }));
      return { title, series, rows, below: 'requests at once' };
    }),
  );
}
