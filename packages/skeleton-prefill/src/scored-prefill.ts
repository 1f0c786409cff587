import type { Device, PrefillAttention, Stream } from '@kv/sparse-core';
import { expectOptions, type OptionNames } from '@kv/sparse-core/native';

import type { BlockScoresArguments } from './block-scores.js';
import { blockSparsePrefill, expectDenseLastRows, tileRows } from './block-sparse-prefill.js';
import { type BlockThreshold, expectThreshold, keyBlockTokens } from './block-threshold.js';
import type { PromptStep } from './estimated-cost.js';
import { exactTokens, type ExactTokens } from './exact-tokens.js';

export interface ScoredPrefillSettings extends ExactTokens {
  /** Rows at a prompt's end, as far as they come in its last step, that attend to all keys. Default: 128, of `clusteredPrefill` 32. */
  readonly denseLastRows?: number | undefined;
}

export type ScoredPrefillOptions = BlockThreshold & ScoredPrefillSettings;

export const scoredOptions: OptionNames<ScoredPrefillOptions> = {
  ...{ epsilon: true, budget: true, mass: true, ofMax: true },
  ...{ denseLastRows: true, sinkTokens: true, diagonalTokens: true },
};

/** What one preset that estimates block scores has of its own. */
export interface ScoredMethod {
  readonly subject: string;
  readonly label: string;
  readonly defaults: Required<ExactTokens> & Pick<ScoredPrefillSettings, 'denseLastRows'>;
  /** How many multiplications of dense attention take as long as the estimate of a step. */
  cost(kind: Device['kind'], step: PromptStep): number;
  score(stream: Stream, args: BlockScoresArguments): void;
}

/** @throws InvalidValueError for options out of range */
export function scoredPrefill(options: ScoredPrefillOptions, method: ScoredMethod): PrefillAttention {
  const { subject, label, defaults } = method;
  expectOptions(subject, options, scoredOptions);
  const { denseLastRows = defaults.denseLastRows ?? tileRows, sinkTokens = defaults.sinkTokens, ...others } = options;
  const { diagonalTokens = defaults.diagonalTokens, ...threshold } = others;
  expectThreshold(subject, threshold, keyBlockTokens);
  expectDenseLastRows(subject, denseLastRows);
  const [rule, value] = Object.entries(threshold).find(([, given]) => given !== undefined) ?? [];

  return blockSparsePrefill({
    name: rule === 'budget' ? `${label} ${value}` : `${label} ${rule} = ${value}`,
    select: { threshold, ...exactTokens(subject, { sinkTokens, diagonalTokens }) },
    denseLastRows,
    cost: (kind, step) => method.cost(kind, step),
    estimate(stream, estimated, choose) {
      const { layer, rows, tokens } = estimated;
      const shape = [layer.queryHeads, Math.ceil(rows / tileRows), Math.ceil(tokens / keyBlockTokens)] as const;
      using scores = stream.device.tensor('f32', ['queryHead', 'queryTile', 'keyBlock'], shape);
      method.score(stream, { ...estimated, scores });
      choose({ scores, tokens, rows });
    },
  });
}
