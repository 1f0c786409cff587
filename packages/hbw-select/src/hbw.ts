import { CapabilityError } from '@kv/sparse-core';
import type { KvSelector, SelectCall, Stream, TensorHandle, TokenSelection } from '@kv/sparse-core';
import { expectBoolean, expectOptions, expectThat, type OptionNames } from '@kv/sparse-core/native';

import { capacityOf } from './capacity.js';
import type { Capacity } from './capacity.js';
import { enqueueSelection } from './enqueue-selection.js';
import { expectChoice, expectWhole } from './expect.js';
import { moveBudgets } from './head-budgets.js';
import { expectHeadShares, sharedCapacity } from './head-shares.js';
import type { HeadShares } from './head-shares.js';
import { groupReductions, observationScores, scoreDomains } from './operations/observation-scores.js';
import type { GroupReduction, ScoreDomain } from './operations/observation-scores.js';
import { keptTokens } from './operations/select-tokens.js';
import type { SelectTokensRow } from './operations/select-tokens.js';
import { expectSelectOptions } from './select-options.js';
import type { SelectTokensOptions } from './select-options.js';

export interface HbwSettings extends SelectTokensOptions {
  /** The prompt's last tokens: their queries are what is looked at, and they are always kept. Default: 32. */
  readonly window?: number | undefined;
  /** Whether the capacity counts the window's tokens. Default: true. */
  readonly windowInCapacity?: boolean | undefined;
  /** How the kv heads of all layers share the capacity, in whole blocks of the store. Default: equally. */
  readonly headShares?: HeadShares | undefined;
  /** Tokens of a block. Default: `max(1, floor(capacity / 32))`. */
  readonly blockTokens?: number | undefined;
  /** The keys of a softmax's denominator: all that a query sees, or the prefix only. Default: `full`. */
  readonly scoreDomain?: ScoreDomain | undefined;
  /** Over the query heads that share a kv head. Default: `mean`. */
  readonly groupReduction?: GroupReduction | undefined;
  /**
   * Share of its capacity that every kv head has for itself, 0 to 1; the rest of all heads goes to those that
   * hold the best scores. Below 1 a selection waits for the device. Default: 1, all heads keep as many.
   */
  readonly headFloor?: number | undefined;
}

export type HbwOptions = Capacity & HbwSettings;

const hbwOptions: OptionNames<HbwOptions> = {
  ...{ capacity: true, keepRatio: true, window: true, windowInCapacity: true, headShares: true, headFloor: true, blockTokens: true },
  ...{ scoreDomain: true, groupReduction: true, rounds: true, dedup: true, remainder: true, sinkTokens: true, pooling: true },
};

/**
 * HBW-KV: keeps, of each kv head, the window and the blocks that it looks at most, chosen in rounds of more and
 * more groups, so that every part of the prompt is represented. A prompt within the capacity is kept whole.
 * @throws InvalidValueError for options out of range; its selector throws a CapabilityError for a store that
 * does not hold dense keys
 */
export function hbw(options: HbwOptions): KvSelector {
  expectOptions('hbw', options, hbwOptions);
  return attentionSelector('hbw', options);
}

/** A selector by the attention of the prompt's last queries, under a name for tables. */
export function attentionSelector(name: string, options: HbwOptions): KvSelector {
  const { window = 32, windowInCapacity = true, scoreDomain = 'full', groupReduction = 'mean' } = options;
  const { blockTokens, headShares, headFloor = 1 } = options;
  const capacity = capacityOf(options);
  expectWhole(name, 'window', window, 1);
  expectChoice(name, 'scoreDomain', scoreDomain, scoreDomains);
  expectChoice(name, 'groupReduction', groupReduction, groupReductions);
  expectBoolean(name, 'windowInCapacity', windowInCapacity);
  expectThat(name, 'headFloor', headFloor, Number.isFinite(headFloor) && headFloor >= 0 && headFloor <= 1, 'a share from 0 to 1');
  if (blockTokens !== undefined) expectWhole(name, 'blockTokens', blockTokens, 1);
  expectSelectOptions(options);
  if (headShares !== undefined) expectHeadShares(headShares);

  const rowOf = ({ store, lastQueries, tokens }: SelectCall, kvHead: number, length: number): SelectTokensRow => {
    const layer = store.layer.index;
    const windowTokens = Math.min(length, lastQueries.shape[0]);
    const equal = capacity(layer, tokens);
    const storeBlock = store.denseBlocks()?.keys.shape[1] ?? 1;
    const total = headShares === undefined ? equal : sharedCapacity(headShares, { layer, kvHead }, equal, storeBlock);
    return {
      prefixTokens: length - windowTokens,
      windowTokens,
      capacity: windowInCapacity ? total : total + windowTokens,
      blockTokens: blockTokens ?? Math.max(1, Math.floor(total / 32)),
    };
  };

  return {
    name,
    observationWindow: window,
    select(stream, call) {
      const rows = call.store.lengths(call.slot).map((length, kvHead) => rowOf(call, kvHead, length));
      if (rows.every((row) => keptTokens(row) === row.prefixTokens + row.windowTokens)) return undefined;
      if (headFloor < 1) return selectWithMovedBudgets(stream, call, rows);
      using scores = score(stream, call, rows, { domain: scoreDomain, groupReduction });
      return enqueueSelection(stream, scores, rows, options);
    },
  };

  async function selectWithMovedBudgets(
    stream: Stream,
    call: SelectCall,
    rows: readonly SelectTokensRow[],
  ): Promise<TokenSelection> {
    using scores = score(stream, call, rows, { domain: scoreDomain, groupReduction });
    const moved = await moveBudgets(stream, scores, rows, headFloor);
    return await enqueueSelection(stream, scores, moved, options);
  }
}

/** f32 `[batch, kvHead, token]` of the one slot. */
function score(
  stream: Stream,
  { store, slot, lastQueries, scale }: SelectCall,
  rows: readonly SelectTokensRow[],
  options: { readonly domain: ScoreDomain; readonly groupReduction: GroupReduction },
): TensorHandle<'f32', readonly ['batch', 'kvHead', 'token']> {
  const blocks = store.denseBlocks([slot]);
  if (blocks === undefined) {
    throw new CapabilityError(
      `The ${store.name} store does not hold dense keys, which selecting tokens by attention reads. ` +
        'Use a store that keeps a prompt dense until it is complete, such as densePagedStore().',
      { subject: store.name },
    );
  }
  const { device } = stream;
  const tokens = Math.max(...rows.map((row) => row.prefixTokens));
  const scores = device.tensor('f32', ['batch', 'kvHead', 'token'], [1, rows.length, tokens]);
  using slots = device.tensor('i32', ['batch'], [1], Int32Array.of(slot));
  using queryStart = device.tensor('i32', ['boundary'], [2], Int32Array.of(0, lastQueries.shape[0]));
  observationScores(stream, { query: lastQueries, scores, blocks, slots, queryStart, scale, ...options });
  return scores;
}
