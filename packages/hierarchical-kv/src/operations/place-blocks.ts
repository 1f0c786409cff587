import type { Stream } from '@kv/sparse-core';
import { expectThat, loadAddon, operation } from '@kv/sparse-core/native';
import { type BlockBatch, blockBatchRules, type BlockTableHandle, expectBlockTokens, type FixedBlocks, tableRule } from './block-batch.js';
import type { BlockCache, PlannedBlocks } from './plan-blocks.js';

export interface PlaceBlocksArguments
  extends BlockBatch,
    Pick<FixedBlocks, 'blockTokens' | 'sinkBlocks'>,
    Pick<BlockCache, 'where' | 'holds' | 'usedAt'>,
    Pick<PlannedBlocks, 'loads' | 'loadCount'> {
  /** i32: the host blocks of each kv head. */
  readonly blockTable: BlockTableHandle;
  /** i32, of the shape of `blockTable`: where the blocks are now. */
  readonly sourceTable: BlockTableHandle;
  /** Rows of the batch, or more. */
  readonly rows: number;
  /** The first place of the cache. */
  readonly firstCached: number;
}

const vector = (name: string, axis: string | number) => ({ name, dtype: ['i32'] as const, shape: [axis], layout: 'contiguous' }) as const;

/** In the order of `native/bindings/place-blocks.binding.cc`. */
const rules = [
  tableRule,
  ...blockBatchRules,
  { ...tableRule, name: 'sourceTable' },
  vector('where', 'hostBlock'),
  vector('holds', 'cachedBlock'),
  vector('usedAt', 'cachedBlock'),
  { name: 'loads', dtype: ['i32'], shape: [2, 'load'], layout: 'contiguous' },
  vector('loadCount', 1),
] as const;

const enqueue = operation('placeBlocks', rules, ['where', 'holds', 'usedAt', 'loads', 'loadCount']);

/**
 * Gives blocks that rows of the batch filled places of a cache of `planBlocks`, as long as places hold nothing; `keyCounts`
 * includes the rows. The first `sinkBlocks` of a sequence have places of their own. All kv heads get as many places, for the
 * first blocks before later ones. `loads` lists what to copy from where to where, for `fetchBlocks`. What has a place so was never
 * chosen: it leaves before all that was. No two entries may fill the same host block.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError when `loads` has no room for all blocks of the batch's tables; tables that lead outside reject the
 * stream's next wait with one
 */
export function placeBlocks(stream: Stream, args: PlaceBlocksArguments): void {
  enqueue(stream, args, (natives, [table, , slots, , , , , , loads]) => {
    const name = 'placeBlocks';
    const { rows, blockTokens, sinkBlocks, firstCached } = args;
    const most = slots.shape[0] * table.shape[1] * table.shape[2];
    const isCount = (count: number) => Number.isInteger(count) && count >= 0 && count < 2 ** 31;
    expectThat(name, 'rows', rows, isCount(rows), 'a number of rows');
    expectBlockTokens(name, blockTokens);
    expectThat(name, 'sinkBlocks', sinkBlocks, isCount(sinkBlocks), 'a number of blocks');
    expectThat(name, 'firstCached', firstCached, isCount(firstCached) && isCount(firstCached + args.holds.shape[0]), 'a number of places');
    expectThat(name, 'loads', loads.shape, loads.shape[1] >= most, `of ${most} loads or more, one for each block of the batch's tables`);
    loadAddon().placeBlocks(stream.native, ...natives, rows, blockTokens, sinkBlocks, firstCached);
  });
}
