import type { KvCapacity } from '@kv/sparse-core';
import { anySparse, type Shares } from '../block-sparsity.js';
import { blockTokens, type KvOperand, operands } from '../blocks-24.js';

/** How many blocks of each kind the pools of a cache have. */
export interface PoolSizes {
  /** Dense blocks of keys with one of values. */
  readonly pairs: number;
  /** Dense blocks of either. */
  readonly singles: number;
  /** Singles beyond, for what is both dense and sparse while it is compressed. */
  readonly spareSingles: number;
  readonly sparse: Readonly<Record<KvOperand, number>>;
}

/** What the sizes follow from, of one layer. */
export interface LayerRules {
  readonly kvHeads: number;
  /** What is sparse of a prompt while it is read. */
  readonly prompt: Shares;
  /** And what is when it is complete: not less. */
  readonly after: Shares;
}

/** What stays dense whatever the shares are. */
export interface DenseTokens {
  readonly sinkBlocks: number;
  /** Tokens. */
  readonly localWindow: number;
}

/**
 * Room for `tokens` in the worst mixture of prompts and answers. Where prompts are sparse, blocks that leave the local
 * window leave their pairs. Where prompts are dense every block needs a pair anyway, and one that stays dense keeps it.
 */
export function poolSizes(
  layers: readonly LayerRules[],
  { slots, tokens, batchRows = tokens }: Pick<KvCapacity, 'slots' | 'tokens' | 'batchRows'>,
  { sinkBlocks, localWindow }: DenseTokens,
): PoolSizes {
  // Every sequence may leave one block of each head partly filled.
  const most = Math.ceil(tokens / blockTokens) + slots;
  const batch = Math.ceil(batchRows / blockTokens) + slots;
  const outsideRange = slots * (sinkBlocks + Math.ceil(localWindow / blockTokens) + 1);
  const inAllHeads = (ofHead: (layer: LayerRules) => number) =>
    layers.reduce((sum, layer) => sum + layer.kvHeads * ofHead(layer), 0);
  // Every sequence may round half a block of each head up.
  const share = (part: number) => (part === 0 ? 0 : Math.min(most, Math.ceil(part * most + slots / 2)));
  const rounds = ({ prompt }: LayerRules) => operands.some((operand) => prompt[operand] % 1 !== 0);
  return {
    pairs: inAllHeads(({ prompt }) => (anySparse(prompt) ? Math.min(most, outsideRange + batch) : most)),
    singles: inAllHeads(({ prompt }) =>
      anySparse(prompt) ? share(1 - prompt.keys) + share(1 - prompt.values) : 0,
    ),
    spareSingles: Math.max(0, ...layers.map((layer) => (rounds(layer) ? layer.kvHeads * batch : 0))),
    sparse: {
      keys: inAllHeads(({ after }) => share(after.keys)),
      values: inAllHeads(({ after }) => share(after.values)),
    },
  };
}
