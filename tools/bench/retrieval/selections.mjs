// What is compared: each way to select at a quarter, an eighth and a sixteenth of the prompt.
import { readFileSync } from 'node:fs';
import { halo, hbw, snapKv, streaming } from '../../../packages/hbw-select/dist/index.js';

const headShares = JSON.parse(readFileSync(new URL('head-shares.json', import.meta.url), 'utf8'));

/** The published one is what the others are compared with. */
export const reference = 'SnapKV';

export const ways = {
  HBW: hbw,
  [reference]: snapKv,
  'SnapKV, max 7': (capacity) => snapKv({ ...capacity, pooling: { kind: 'max', tokens: 7 } }),
  'SnapKV, wide pool': (capacity) => snapKv({ ...capacity, pooling: { kind: 'average', tokens: 21 } }),
  streaming,
  halo,
  'halo, head shares': (capacity) => halo({ ...capacity, headShares }),
};

export const shares = [4, 8, 16];

/** What each part of `halo` is for: one setting changed at a time, at an eighth of the prompt. */
export const ablations = {
  'halo, window 8': { window: 8 },
  'halo, window 32': { window: 32 },
  'halo of 5': { haloTokens: 5 },
  'halo of 13': { haloTokens: 13 },
  'halo of 49': { haloTokens: 49 },
  'halo, head floor 1/4': { headFloor: 0.25 },
  'halo, window 8, head shares': { window: 8, headShares },
};

export const selections = [
  { name: 'dense', select: () => undefined },
  ...Object.entries(ways).flatMap(([name, way]) =>
    shares.map((share) => ({ name: `${name} 1/${share}`, select: () => way({ keepRatio: 1 / share }) })),
  ),
  ...Object.entries(ablations).map(([name, settings]) => ({
    name: `${name} 1/8`,
    select: () => halo({ keepRatio: 1 / 8, ...settings }),
  })),
];
