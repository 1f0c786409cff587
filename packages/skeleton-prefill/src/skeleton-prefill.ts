import { blockSparseAttention, CapabilityError, prefillAttention } from '@kv/sparse-core';
import type { PagedBlocks, PrefillAttention, PrefillCall, PrefillReport, RowBatchEntry, Stream } from '@kv/sparse-core';
import { expectObject, expectThat } from '@kv/sparse-core/native';

import { isWorthEstimating } from './estimated-cost.js';
import { isWhole } from './exact-tokens.js';
import { decomposeAttention, decomposeOptions, decompositionStateBytes } from './operations/decompose-attention.js';
import type { DecomposeAttentionOptions } from './operations/decompose-attention.js';
import { expectSlashBound, expectThreshold, keyBlockTokens, selectKeyBlocks } from './operations/select-key-blocks.js';
import type { BlockThreshold, SlashBound } from './operations/select-key-blocks.js';
import { SkeletonState } from './skeleton-state.js';

export interface SkeletonPrefillSettings extends DecomposeAttentionOptions {
  /** What is taken for the largest slash part of a block. Default: `safe`, its upper bound. */
  readonly slashBound?: SlashBound | undefined;
  /** Rows at a prompt's end, as far as they come in its last step, that attend to all keys. Default: 128. */
  readonly denseLastRows?: number | undefined;
}

export type SkeletonPrefillOptions = BlockThreshold & SkeletonPrefillSettings;

const tileRows = 128;
/** Of thresholds on the lost mass nothing is known before: what the cost is taken for. */
const usualShare = 0.25;

/** A part of a batch, and why it is computed densely, if it is. */
interface Part {
  readonly index: number;
  readonly entry: RowBatchEntry;
  readonly fallback: string | undefined;
}

/**
 * Attention of prompts over the blocks of keys that count, found by an on-line estimate of the attention map (Sparse
 * Skeleton). Works over any store that keeps dense blocks of every token. Steps for which dense attention is faster, and
 * sequences that had tokens dropped, are computed densely, and the report says why.
 * @throws InvalidValueError for options out of range; its `attend` throws a CapabilityError for a store without dense
 * blocks
 */
export function skeletonPrefill(options: SkeletonPrefillOptions): PrefillAttention {
  expectObject('skeletonPrefill', 'options', options);
  const { epsilon, budget, slashBound = 'safe', denseLastRows = tileRows } = options;
  const threshold = { epsilon, budget } as BlockThreshold;
  expectThreshold('skeletonPrefill', threshold, keyBlockTokens);
  expectSlashBound('skeletonPrefill', slashBound);
  decomposeOptions('skeletonPrefill', options, 1);
  const whole = isWhole(denseLastRows, 0, 2 ** 31 - 1);
  expectThat('skeletonPrefill', 'denseLastRows', denseLastRows, whole, 'a whole number from 0 on');

  /** Why an entry is computed densely. */
  const fallbackOf = (stream: Stream, { store, rope }: PrefillCall, { slot, position, rows }: RowBatchEntry) => {
    const { layer } = store;
    const tokens = position + rows;
    if (store.lengths(slot).some((length) => length !== tokens)) return 'tokens of the sequence were dropped';
    const { sinkTokens, diagonalTokens, samples } = decomposeOptions('skeletonPrefill', options, layer.headDim);
    const worthwhile = isWorthEstimating(stream.device.kind, {
      layer,
      rows,
      tokens,
      pairs: rope.inverseFrequencies.length,
      samples,
      exactTokens: sinkTokens + diagonalTokens,
      share: budget ?? (epsilon === 0 ? 1 : usualShare),
    });
    return worthwhile ? undefined : 'the estimate would take longer than it saves';
  };

  /** Enqueues one entry over its blocks, and returns how many each tile has. */
  const attendSparsely = (stream: Stream, call: PrefillCall, blocks: PagedBlocks, { index, entry }: Part): Promise<Int32Array> => {
    const { device } = stream;
    const { store, batch, query, output, scale, rope } = call;
    const { queryHeads, kvHeads, headDim } = store.layer;
    const { slot, position, rows } = entry;
    const tokens = position + rows;
    const endsPrompt = call.endsPrompt[index] === true;
    const pairs = rope.inverseFrequencies.length;
    const own = call.state instanceof SkeletonState ? call.state : new SkeletonState(device);
    const prompt = own.of(slot, position, decompositionStateBytes({ queryHeads, kvHeads, headDim, pairs }));
    using inverseFrequencies = device.tensor('f32', ['pair'], [pairs], rope.inverseFrequencies);
    using slash = device.tensor('f32', ['queryHead', 'lag'], [queryHeads, tokens]);
    using vertical = device.tensor('f32', ['queryHead', 'key'], [queryHeads, tokens]);
    using horizontal = device.tensor('f32', ['queryHead', 'row'], [queryHeads, rows]);
    const tiles = Math.ceil(rows / tileRows);
    using keyBlockCounts = device.tensor('i32', ['queryHead', 'queryTile'], [queryHeads, tiles]);
    const lists = [queryHeads, tiles, Math.ceil(tokens / keyBlockTokens)] as const;
    using keyBlocks = device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], lists);
    const [slots, queryStart] = [batch.slots.slice('batch', index, index + 1), batch.queryStart.slice('boundary', index, index + 2)];
    const attended = { query, blocks, slots, queryStart, scale };
    const parts = { slash, vertical, horizontal };
    const { convention, attentionScale } = rope;
    decomposeAttention(stream, { ...options, ...attended, ...parts, ...prompt, inverseFrequencies, convention, attentionScale });
    prompt.seenTokens = tokens;
    const denseRows = endsPrompt ? denseLastRows : 0;
    selectKeyBlocks(stream, { ...options, ...parts, threshold, slashBound, denseRows, tileRows, keyBlocks, keyBlockCounts });
    blockSparseAttention(stream, { ...attended, output, keyBlocks, keyBlockCounts });
    if (endsPrompt || own !== call.state) own.release(stream, slot);
    return keyBlockCounts.read();
  };

  return {
    name: epsilon === undefined ? `skeleton ${budget}` : `skeleton ε = ${epsilon}`,
    open: (_layer, { device }) => new SkeletonState(device),
    attend(stream, call) {
      const { store, batch, query, output, scale } = call;
      const blocks = store.denseBlocks(batch.entries.map(({ slot }) => slot));
      if (blocks === undefined) {
        throw new CapabilityError(
          `The estimate of attention reads dense blocks, which the store '${store.name}' does not keep. ` +
            'Use a store that keeps a prompt dense until it is complete, such as densePagedStore().',
          { subject: 'prefill', given: store.name, wanted: 'dense blocks' },
        );
      }
      const parts = batch.entries.map((entry, index) => ({ index, entry, fallback: fallbackOf(stream, call, entry) }));
      const reads: Promise<Int32Array | undefined>[] = [];
      for (const part of parts) {
        const { index, fallback } = part;
        if (fallback === undefined) {
          reads.push(attendSparsely(stream, call, blocks, part));
          continue;
        }
        reads.push(Promise.resolve(undefined));
        // Those that follow each other are one call.
        if (index > 0 && parts[index - 1]?.fallback !== undefined) continue;
        const sparse = parts.findIndex((other) => other.index > index && other.fallback === undefined);
        const end = sparse === -1 ? parts.length : sparse;
        const [slots, queryStart] = [batch.slots.slice('batch', index, end), batch.queryStart.slice('boundary', index, end + 1)];
        prefillAttention(stream, { query, output, blocks, slots, queryStart, scale });
      }
      return { report: reportOf(parts, reads, store.layer.queryHeads) };
    },
  };
}

/** How many blocks the tiles of an entry see, of all heads. */
function blocksSeen({ position, rows }: RowBatchEntry, queryHeads: number): number {
  let seen = 0;
  for (let end = 0; end < rows; ) {
    end = Math.min(rows, end + tileRows);
    seen += Math.ceil((position + end) / keyBlockTokens);
  }
  return seen * queryHeads;
}

/** Of blocks: how many were computed. */
function reportOf(
  parts: readonly Part[],
  reads: readonly Promise<Int32Array | undefined>[],
  queryHeads: number,
): PrefillReport | Promise<PrefillReport> {
  if (parts.every(({ fallback }) => fallback !== undefined)) return { density: 1, fallback: parts[0]?.fallback };
  const seen = parts.map(({ entry }) => blocksSeen(entry, queryHeads));
  return Promise.all(reads).then((counts) => {
    const computed = counts.map((of, index) => of?.reduce((sum, count) => sum + count, 0) ?? seen[index] ?? NaN);
    const sum = (numbers: readonly number[]) => numbers.reduce((all, number) => all + number, 0);
    return { density: sum(computed) / sum(seen) };
  });
}
