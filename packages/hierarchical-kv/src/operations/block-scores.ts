import type { FloatDType, Stream, TensorHandle } from '@kv/sparse-core';
import { expectHeads, expectThat, floats, loadAddon, operation } from '@kv/sparse-core/native';
import { type BlockBatch, blockBatchRules, type BlockTableHandle, expectBlockTokens, tableRule } from './block-batch.js';

export interface BlockScoresArguments extends BlockBatch {
  /** `[token, queryHead, dim]`, after RoPE; query heads are a multiple of the kv heads. */
  readonly query: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** f32 `[token, kvHead, block]`, with a block for each of the table's rows, or more. */
  readonly scores: TensorHandle<'f32', readonly ['token', 'kvHead', 'block']>;
  /** `[metadataBlock, vector, dim]`, from `blockMetadata`. */
  readonly metadata: TensorHandle<FloatDType, readonly ['metadataBlock', 'vector', 'dim']>;
  /** i32: the blocks of `metadata` of each kv head. */
  readonly blockTable: BlockTableHandle;
  /** Tokens of a block. */
  readonly blockTokens: number;
}

/** In the order of `native/bindings/block-scores.binding.cc`. */
const rules = [
  { name: 'query', dtype: floats, shape: ['token', 'queryHead', 'dim'], layout: 'rows' },
  { name: 'scores', dtype: ['f32'], shape: ['token', 'kvHead', 'scoredBlock'], layout: 'rows' },
  { name: 'metadata', dtype: floats, shape: ['metadataBlock', 'vector', 'dim'], layout: 'contiguous' },
  tableRule,
  ...blockBatchRules,
] as const;

const enqueue = operation('blockScores', rules, ['scores']);

/**
 * Scores of every row with every full block of its slot, from what `blockMetadata` says of the block: over the query heads of
 * a kv head the largest of `q . mean`, or, of a box, of the sum over dims of `max(q * low, q * high)`. Scores of other blocks
 * are not written. A NaN counts as minus infinity. Sums are f32 in an order of their own: every device makes the same bits.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError; tables that lead outside reject the stream's
 * next wait with an InvalidValueError
 */
export function blockScores(stream: Stream, args: BlockScoresArguments): void {
  enqueue(stream, args, (natives, [query, scores, metadata, table]) => {
    const name = 'blockScores';
    expectHeads(name, query, table.shape[1]);
    expectThat(name, 'query', query.shape, query.shape[1] > 0, 'of a query head or more');
    expectThat(name, 'metadata', metadata.shape, metadata.shape[1] === 1 || metadata.shape[1] === 2, 'of 1 or 2 vectors a block');
    expectThat(name, 'scores', scores.shape, scores.shape[2] >= table.shape[2], `of ${table.shape[2]} blocks or more, like the table`);
    expectBlockTokens(name, args.blockTokens);
    loadAddon().blockScores(stream.native, ...natives, args.blockTokens);
  });
}
