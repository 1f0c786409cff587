import type { KvSelector } from '@kv/sparse-core';
import { expectOptions } from '@kv/sparse-core/native';

import type { Capacity } from './capacity.js';
import type { HeadShares } from './head-shares.js';
import { attentionSelector } from './hbw.js';

export interface HaloSettings {
  /** The prompt's last tokens: their queries are what is looked at, and they are always kept. Default: 16. */
  readonly window?: number | undefined;
  /** Tokens around a token that the window looks at, itself included, that are as good as it is; odd. Default: 25. */
  readonly haloTokens?: number | undefined;
  /** How the kv heads of all layers share the capacity, in whole blocks of the store. Default: equally. */
  readonly headShares?: HeadShares | undefined;
  /** Share of its capacity that every kv head of a layer has for itself. Default: 1, all heads keep as many. */
  readonly headFloor?: number | undefined;
}

/**
 * Keeps what the window looks at with a halo around it: a token's score is the greatest within the halo, so that a
 * fact is kept whole though only its beginning is looked at before it is read. The window is half of SnapKV's, since
 * the queries of a question say more than those before it.
 * @throws InvalidValueError
 */
export function halo(options: Capacity & HaloSettings): KvSelector {
  expectOptions('halo', options, { capacity: true, keepRatio: true, window: true, haloTokens: true, headShares: true, headFloor: true });
  const { haloTokens = 25, window = 16, ...more } = options;
  const pooling = { kind: 'max', tokens: haloTokens } as const;
  return attentionSelector('halo', { ...more, window, pooling, rounds: [1], blockTokens: 1 });
}
