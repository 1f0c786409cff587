import type { Device, Tensor } from '@kv/sparse-core';
import { type BlockTable, madeTogether } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';

/** What rows read: of each kv head blocks of a pool, and the tokens in these. */
export interface ReadBlocks {
  readonly ids: ArrayLike<number>;
  /** Default: those of whole blocks. */
  readonly tokens?: number | undefined;
}

/** As attention takes them, a slot for each segment. */
export interface RowTables extends Disposable {
  readonly blockTable: BlockTable;
  readonly keyCounts: Tensor<'i32', readonly ['slot', 'kvHead']>;
}

/**
 * @param segments of each, what each kv head reads
 * @throws OutOfMemoryError
 */
export function rowTables(device: Device, segments: readonly (readonly ReadBlocks[])[]): RowTables {
  const kvHeads = segments[0]?.length ?? 0;
  const width = Math.max(1, ...segments.flatMap((heads) => heads.map(({ ids }) => ids.length)));
  const table = new Int32Array(segments.length * kvHeads * width);
  const counts = new Int32Array(segments.length * kvHeads);
  segments.flat().forEach(({ ids, tokens = ids.length * blockTokens }, row) => {
    table.set(ids, row * width);
    counts[row] = tokens;
  });
  return madeTogether((own) => {
    const blockTable = own(device.tensor('i32', ['slot', 'kvHead', 'block'], [segments.length, kvHeads, width], table));
    const keyCounts = own(device.tensor('i32', ['slot', 'kvHead'], [segments.length, kvHeads], counts));
    const dispose = () => {
      blockTable.dispose();
      keyCounts.dispose();
    };
    return { blockTable, keyCounts, [Symbol.dispose]: dispose };
  });
}
