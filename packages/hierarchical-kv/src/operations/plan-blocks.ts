import type { Stream, TensorHandle } from '@kv/sparse-core';
import { expectThat, loadAddon, operation } from '@kv/sparse-core/native';
import { type BlockBatch, blockBatchRules, type BlockTableHandle, expectFixedBlocks, type FixedBlocks, tableRule } from './block-batch.js';
import { type ChosenBlocks, chosenRules } from './select-top-blocks.js';

/** Steps of a working set. */
export const workingSetSteps = 12;

/**
 * What the device knows of its blocks. All of a new cache is: `where` and `holds` -1, the rest 0. A host block whose
 * contents change must have -1 in `where` before it is planned again, a slot that is emptied zeros in `demand`.
 */
export interface BlockCache {
  /** i32 `[hostBlock]`: the place that has it, or -1. */
  readonly where: TensorHandle<'i32', readonly ['hostBlock']>;
  /** i32 `[cachedBlock]`: the host block that a place of the cache has, if `where` says so too. */
  readonly holds: TensorHandle<'i32', readonly ['cachedBlock']>;
  /** i32 `[cachedBlock]`: the step that last chose it. */
  readonly usedAt: TensorHandle<'i32', readonly ['cachedBlock']>;
  /** i32 `[1]`: steps so far. */
  readonly clock: TensorHandle<'i32', readonly ['one']>;
  /** i32 `[slot, kvHead, step, chosenBlock]`, 12 steps: what they chose of the cache. */
  readonly history: TensorHandle<'i32', readonly ['slot', 'kvHead', 'step', 'chosenBlock']>;
  /** i32 `[slot, kvHead, count]`, 4 counts: steps, working set, hits, misses. */
  readonly demand: TensorHandle<'i32', readonly ['slot', 'kvHead', 'count']>;
}

/** What attention reads, and what has to be loaded first. */
export interface PlannedBlocks {
  /** i32 `[slot, kvHead, chosenBlock]`: the places of the chosen blocks. */
  readonly readTable: TensorHandle<'i32', readonly ['slot', 'kvHead', 'chosenBlock']>;
  /** i32 `[slot, kvHead]`: their tokens. */
  readonly readCounts: TensorHandle<'i32', readonly ['slot', 'kvHead']>;
  /** i32 `[from | to, load]`, with room for a load of every chosen block of the batch. */
  readonly loads: TensorHandle<'i32', readonly ['end', 'load']>;
  /** i32 `[1]` */
  readonly loadCount: TensorHandle<'i32', readonly ['one']>;
}

export interface PlanBlocksArguments extends BlockBatch, ChosenBlocks, FixedBlocks, BlockCache, PlannedBlocks {
  /** i32: the host blocks of each kv head. */
  readonly blockTable: BlockTableHandle;
  /** Rows of the batch, or more. */
  readonly rows: number;
}

const vector = (name: string, axis: string | number) =>
  ({ name, dtype: ['i32'] as const, shape: [axis], layout: 'contiguous' }) as const;

/** In the order of `native/bindings/plan-blocks.binding.cc`. */
const rules = [
  tableRule,
  ...blockBatchRules,
  ...chosenRules,
  vector('where', 'hostBlock'),
  vector('holds', 'cachedBlock'),
  vector('usedAt', 'cachedBlock'),
  vector('clock', 1),
  { name: 'history', dtype: ['i32'], shape: ['slot', 'kvHead', workingSetSteps, 'chosenBlock'], layout: 'contiguous' },
  { name: 'demand', dtype: ['i32'], shape: ['slot', 'kvHead', 4], layout: 'contiguous' },
  { name: 'readTable', dtype: ['i32'], shape: ['slot', 'kvHead', 'chosenBlock'], layout: 'contiguous' },
  { name: 'readCounts', dtype: ['i32'], shape: ['slot', 'kvHead'], layout: 'contiguous' },
  { name: 'loads', dtype: ['i32'], shape: [2, 'load'], layout: 'contiguous' },
  vector('loadCount', 1),
] as const;

const enqueue = operation('planBlocks', rules, [
  ...(['where', 'holds', 'usedAt', 'clock', 'history', 'demand'] as const),
  ...(['readTable', 'readCounts', 'loads', 'loadCount'] as const),
]);

/**
 * Plans what a step reads of blocks that are all in host memory. The first `sinkBlocks` and the last `recentBlocks` of a
 * sequence have places of their own on the device: block `b` of kv head `h` of slot `s` is in place
 * `(s * kvHeads + h) * (sinkBlocks + recentBlocks) + (b < sinkBlocks ? b : sinkBlocks + b % recentBlocks)`. Behind all these
 * places is a cache of the others, of which `holds` says how many it has. Chosen blocks that it lacks take the places of
 * those that no step chose for longest, of equal ones the lower places; places that hold nothing, or what was never chosen, first. What several
 * sequences choose is loaded once, and nothing that this step chooses leaves. Every device makes the same plan.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError when a list has no room for the first and the last blocks, or `loads` none for all chosen blocks;
 * lists and tables that lead outside, and a step that chooses more than the cache has, reject the stream's next wait with one
 */
export function planBlocks(stream: Stream, args: PlanBlocksArguments): void {
  enqueue(stream, args, (natives, [, keyCounts, slots, , chosen, , , , , , , , , , loads]) => {
    const name = 'planBlocks';
    const { rows, blockTokens, sinkBlocks, recentBlocks } = args;
    const [, , room] = chosen.shape;
    const most = slots.shape[0] * keyCounts.shape[1] * room;
    expectThat(name, 'rows', rows, Number.isInteger(rows) && rows >= 0 && rows < 2 ** 31, 'a number of rows');
    expectFixedBlocks(name, args, room);
    expectThat(name, 'loads', loads.shape, loads.shape[1] >= most, `of ${most} loads or more, one for each chosen block of the batch`);
    loadAddon().planBlocks(stream.native, ...natives, rows, blockTokens, sinkBlocks, recentBlocks);
  });
}
