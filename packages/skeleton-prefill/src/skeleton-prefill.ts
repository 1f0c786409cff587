import type { PrefillAttention } from '@kv/sparse-core';
import { expectOptions, expectThat, type OptionNames } from '@kv/sparse-core/native';

import { blockSparsePrefill, expectDenseLastRows, tileRows } from './block-sparse-prefill.js';
import { estimateRules, type EstimateThreshold, expectThreshold, keyBlockTokens } from './block-threshold.js';
import { decompositionCost, mostLost } from './estimated-cost.js';
import { isWhole } from './exact-tokens.js';
import { decomposeAttention, decomposeOptions, decompositionStateBytes } from './operations/decompose-attention.js';
import type { DecomposeAttentionOptions } from './operations/decompose-attention.js';
import { expectSlashBound, type SlashBound } from './operations/select-key-blocks.js';
import { blocksAtReference } from './reference-blocks.js';

export interface SkeletonPrefillSettings extends DecomposeAttentionOptions {
  /** What is taken for the largest slash part of a block. Default: `safe`, its upper bound. */
  readonly slashBound?: SlashBound | undefined;
  /**
   * N₀, beside an epsilon. Behind so many tokens, tiles take as many blocks on average as epsilon takes there, so that the
   * time of a prompt grows with its length, and not faster. From 1 to 2^31 - 1; default: epsilon holds at every length.
   */
  readonly referenceTokens?: number | undefined;
  /** Rows at a prompt's end, as far as they come in its last step, that attend to all keys. Default: 128. */
  readonly denseLastRows?: number | undefined;
}

export type SkeletonPrefillOptions = EstimateThreshold & SkeletonPrefillSettings;

type Named = Omit<SkeletonPrefillOptions, 'mass' | 'ofMax'>;

const skeletonOptions: OptionNames<Named> = {
  ...{ epsilon: true, budget: true, referenceTokens: true, slashBound: true, denseLastRows: true },
  ...{ sinkTokens: true, diagonalTokens: true, samples: true, seed: true, ridge: true, formulas: true },
};

/**
 * Attention of prompts over the blocks of keys that count, found by an on-line estimate of the attention map (Sparse
 * Skeleton). Works over any store that keeps dense blocks of every token. Steps for which dense attention is faster, and
 * sequences that had tokens dropped, are computed densely, and the report says why.
 * @throws InvalidValueError for options out of range; its `attend` throws a CapabilityError for a store without dense
 * blocks
 */
export function skeletonPrefill(options: SkeletonPrefillOptions): PrefillAttention {
  expectOptions<Named>('skeletonPrefill', options, skeletonOptions);
  const { epsilon, budget, referenceTokens, slashBound = 'safe', denseLastRows = tileRows } = options;
  const threshold = { epsilon, budget } as EstimateThreshold;
  expectThreshold('skeletonPrefill', options, keyBlockTokens, estimateRules);
  expectSlashBound('skeletonPrefill', slashBound);
  expectDenseLastRows('skeletonPrefill', denseLastRows);
  if (referenceTokens !== undefined) {
    const fits = isWhole(referenceTokens, 1, 2 ** 31 - 1) && epsilon !== undefined;
    expectThat('skeletonPrefill', 'referenceTokens', referenceTokens, fits, 'a whole number from 1 to 2^31 - 1, beside an epsilon');
  }
  const optionsOf = (headDim: number) => decomposeOptions('skeletonPrefill', options, headDim);
  const { sinkTokens, diagonalTokens } = optionsOf(1);
  const behind = referenceTokens === undefined ? '' : ` at ${referenceTokens}`;

  return blockSparsePrefill({
    name: epsilon === undefined ? `skeleton ${budget}` : `skeleton epsilon = ${epsilon}${behind}`,
    select: { threshold, slashBound, sinkTokens, diagonalTokens },
    denseLastRows,
    cost: (kind, step) => decompositionCost(kind, step, optionsOf(step.layer.headDim).samples),
    mostLost,
    estimate(stream, rows, choose) {
      const { device } = stream;
      const { layer, tokens, rope } = rows;
      const { queryHeads } = layer;
      const { convention, attentionScale } = rope;
      const pairs = rope.inverseFrequencies.length;
      const prompt = rows.promptState(decompositionStateBytes({ ...layer, pairs }));
      using inverseFrequencies = device.tensor('f32', ['pair'], [pairs], rope.inverseFrequencies);
      using slash = device.tensor('f32', ['queryHead', 'lag'], [queryHeads, tokens]);
      using vertical = device.tensor('f32', ['queryHead', 'key'], [queryHeads, tokens]);
      const parts = { slash, vertical, horizontal: rows.rowPart() };
      decomposeAttention(stream, { ...options, ...rows, ...parts, ...prompt, inverseFrequencies, convention, attentionScale });
      prompt.seenTokens = tokens;
      if (epsilon === undefined || referenceTokens === undefined || tokens <= referenceTokens) choose(parts);
      else {
        const reference = { epsilon, referenceTokens, sinkTokens, diagonalTokens, slashBound };
        choose({ ...parts, threshold: blocksAtReference(stream, prompt, parts, reference) });
      }
    },
  });
}
