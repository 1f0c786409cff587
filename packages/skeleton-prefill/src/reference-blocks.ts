import type { Stream } from '@kv/sparse-core';

import { tileRows } from './block-sparse-prefill.js';
import { keyBlockTokens, type TileBlocks } from './block-threshold.js';
import { selectKeyBlocks } from './operations/select-key-blocks.js';
import type { SelectKeyBlocksOptions, SkeletonParts } from './operations/select-key-blocks.js';
import type { PromptState } from './prompt-states.js';

export interface ReferenceOptions extends Pick<SelectKeyBlocksOptions, 'sinkTokens' | 'diagonalTokens' | 'slashBound'> {
  readonly epsilon: number;
  /** N₀ */
  readonly referenceTokens: number;
}

/**
 * The budget of a step that ends behind N₀ (Sparse Skeleton, section 3.3): tiles take as many blocks on average as ε takes of
 * the tile that ends at N₀ or next behind it. The first such step of a prompt finds out; where none before was estimated,
 * its first tile is that one.
 */
export function blocksAtReference(stream: Stream, prompt: PromptState, parts: SkeletonParts, options: ReferenceOptions): TileBlocks {
  const { epsilon, referenceTokens, ...select } = options;
  prompt.reference ??= (() => {
    const [[queryHeads, tokens], [, rows]] = [parts.slash.shape, parts.horizontal.shape];
    const tiles = Math.ceil(rows / tileRows);
    const tile = Math.floor(Math.max(0, referenceTokens - 1 - (tokens - rows)) / tileRows);
    const end = Math.min(tokens, tokens - rows + (tile + 1) * tileRows);
    const shape = [queryHeads, tiles, Math.ceil(tokens / keyBlockTokens)] as const;
    using keyBlocks = stream.device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], shape);
    const keyBlockCounts = stream.device.tensor('i32', ['queryHead', 'queryTile'], [queryHeads, tiles]);
    // ε is of the tokens up to the tile.
    const threshold = { epsilon: Math.min(2 ** 127, (epsilon * tokens) / end) };
    selectKeyBlocks(stream, { ...select, ...parts, threshold, tileRows, keyBlocks, keyBlockCounts });
    return { keyBlockCounts, tile };
  })();
  const { keyBlockCounts, tile } = prompt.reference;
  return { tileBlocks: keyBlockCounts.slice('queryTile', tile, tile + 1) };
}
