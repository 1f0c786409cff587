import type { PrefillAttention } from '@kv/sparse-core';
import { expectOptions, expectThat } from '@kv/sparse-core/native';

import { blockSparsePrefill, expectDenseLastRows, tileRows } from './block-sparse-prefill.js';
import { expectThreshold, keyBlockTokens } from './block-threshold.js';
import { exactTokens, isWhole } from './exact-tokens.js';

export type StreamingPrefillOptions = StreamingWindow & {
  /** The sequence's first keys, which every row attends to. From 0 to 1024; default: 4. */
  readonly sinkTokens?: number | undefined;
  /** Rows at a prompt's end, as far as they come in its last step, that attend to all keys. Default: 128. */
  readonly denseLastRows?: number | undefined;
};

/** How many nearest keys a row attends to: so many, from 1 on; or as many as this share of all blocks allows. */
export type StreamingWindow =
  | { readonly windowTokens: number; readonly budget?: undefined }
  | { readonly budget: number; readonly windowTokens?: undefined };

/**
 * Attention of prompts over the first keys and a sliding window, whatever they say: a Λ-shape (StreamingLLM).
 * @throws InvalidValueError for options out of range; its `attend` throws a CapabilityError for a store without dense
 * blocks
 */
export function streamingPrefill(options: StreamingPrefillOptions): PrefillAttention {
  const subject = 'streamingPrefill';
  expectOptions(subject, options, { windowTokens: true, budget: true, sinkTokens: true, denseLastRows: true });
  const { windowTokens, budget, sinkTokens = 4, denseLastRows = tileRows } = options;
  exactTokens(subject, { sinkTokens });
  expectDenseLastRows(subject, denseLastRows);
  expectThat(subject, 'options', options, (windowTokens === undefined) !== (budget === undefined), 'either windowTokens or a budget');
  if (budget !== undefined) expectThreshold(subject, { budget }, keyBlockTokens);
  const window = budget === undefined ? windowTokens : 1;
  expectThat(subject, 'windowTokens', window, isWhole(window, 1, 2 ** 31 - 1), 'a whole number from 1 on');

  return blockSparsePrefill({
    name: budget === undefined ? `streaming windowTokens = ${window}` : `streaming ${budget}`,
    // Nothing is estimated, so tiles take sinks and window only.
    select: { threshold: { epsilon: 1 }, sinkTokens, diagonalTokens: window },
    share: budget ?? 0,
    denseLastRows,
    cost: () => 0,
    estimate(_stream, { rows, tokens }, choose) {
      const diagonalTokens = budget === undefined ? window : windowWithin(budget, { sinkTokens, rows, tokens });
      choose({ tokens, rows, diagonalTokens });
    },
  });
}

interface Step {
  readonly sinkTokens: number;
  readonly rows: number;
  readonly tokens: number;
}

/** The blocks that the tiles of a step take. */
function blocksOf(window: number, { sinkTokens, rows, tokens }: Step): number {
  let blocks = 0;
  for (let first = tokens - rows; first < tokens; first += tileRows) {
    const seen = Math.ceil(Math.min(tokens, first + tileRows) / keyBlockTokens);
    const before = Math.floor(Math.max(0, first - window + 1) / keyBlockTokens);
    blocks += seen - Math.max(0, before - Math.ceil(sinkTokens / keyBlockTokens));
  }
  return blocks;
}

/** The largest window whose blocks are no more than this share of all. */
function windowWithin(budget: number, step: Step): number {
  const most = budget * blocksOf(step.tokens, step);
  let [window, above] = [1, step.tokens + 1];
  while (above - window > 1) {
    const middle = Math.floor((window + above) / 2);
    if (blocksOf(middle, step) <= most) window = middle;
    else above = middle;
  }
  return window;
}
