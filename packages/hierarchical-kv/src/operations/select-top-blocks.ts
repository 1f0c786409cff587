import type { Stream, TensorHandle } from '@kv/sparse-core';
import { loadAddon, operation } from '@kv/sparse-core/native';
import { type BlockBatch, blockBatchRules, expectFixedBlocks, type FixedBlocks } from './block-batch.js';

/** Which blocks a kv head of a slot reads. */
export interface ChosenBlocks {
  /** i32 `[slot, kvHead, chosenBlock]`: numbers of blocks within the sequence, ascending. */
  readonly chosen: TensorHandle<'i32', readonly ['slot', 'kvHead', 'chosenBlock']>;
  /** i32 `[slot, kvHead]`: how many. */
  readonly chosenCounts: TensorHandle<'i32', readonly ['slot', 'kvHead']>;
}

export interface SelectTopBlocksArguments extends BlockBatch, ChosenBlocks, FixedBlocks {
  /** f32 `[token, kvHead, block]`, from `blockScores`. */
  readonly scores: TensorHandle<'f32', readonly ['token', 'kvHead', 'block']>;
  /**
   * i32 `[slot]`: blocks that each of its kv heads reads. Fewer than are always read count as those, more than a list has room
   * for as that room.
   */
  readonly budgets: TensorHandle<'i32', readonly ['slot']>;
}

/** In the order of the bindings. */
export const chosenRules = [
  { name: 'chosen', dtype: ['i32'], shape: ['slot', 'kvHead', 'chosenBlock'], layout: 'contiguous' },
  { name: 'chosenCounts', dtype: ['i32'], shape: ['slot', 'kvHead'], layout: 'contiguous' },
] as const;

/** In the order of `native/bindings/select-top-blocks.binding.cc`. */
const rules = [
  { name: 'scores', dtype: ['f32'], shape: ['token', 'kvHead', 'scoredBlock'], layout: 'rows' },
  ...blockBatchRules,
  ...chosenRules,
  { name: 'budgets', dtype: ['i32'], shape: ['slot'], layout: 'contiguous' },
] as const;

const enqueue = operation('selectTopBlocks', rules, ['chosen', 'chosenCounts']);

/**
 * Chooses the blocks that each kv head of the batch's slots reads, in ascending order: the first `sinkBlocks`, the last
 * `recentBlocks`, and of those between them the ones of the largest scores, of equal scores the lower one; as many as
 * the budget of the slot says, or all where they fit. An entry has one row, or none and is left alone. A NaN is below all scores.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError when a list has no room for the first and the last blocks; counts and slots that lead outside
 * reject the stream's next wait with one
 */
export function selectTopBlocks(stream: Stream, args: SelectTopBlocksArguments): void {
  enqueue(stream, args, (natives, [, , , , chosen]) => {
    const { blockTokens, sinkBlocks, recentBlocks } = args;
    expectFixedBlocks('selectTopBlocks', args, chosen.shape[2]);
    loadAddon().selectTopBlocks(stream.native, ...natives, blockTokens, sinkBlocks, recentBlocks);
  });
}
