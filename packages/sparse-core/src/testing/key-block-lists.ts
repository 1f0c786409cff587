import type { Device } from '../handles.js';
import type { AttentionSizes } from './attention-oracle.js';

export const [listedQueryTile, keyBlockTokens] = [128, 64];

/** A tile of the rows of one batch entry, as the lists of blockSparseAttention count them. */
export interface QueryTile {
  readonly entry: number;
  readonly queryHead: number;
  /** How many key blocks, from the first on, hold a key that the tile's last row sees. */
  readonly limit: number;
}

/** The lists that `list` makes for each tile, and whether a key lies in one of its tile's blocks. */
export function keyBlockLists(
  device: Device,
  { rows, keyCounts, kvHeads, group }: Pick<AttentionSizes, 'rows' | 'keyCounts' | 'kvHeads' | 'group'>,
  causal: boolean,
  list: (tile: QueryTile) => readonly number[],
) {
  const queryHeads = kvHeads * group;
  const tilesOf = (count: number) => Math.ceil(count / listedQueryTile);
  const firstTile = rows.map((_, entry) => rows.slice(0, entry).reduce((sum, count) => sum + tilesOf(count), 0));
  const tiles = rows.reduce((sum, count) => sum + tilesOf(count), 0);
  const lists = Array.from({ length: queryHeads }, (_, queryHead) =>
    rows.flatMap((count, entry) =>
      Array.from({ length: tilesOf(count) }, (_, tile) => {
        const behind = Math.max(0, count - (tile + 1) * listedQueryTile);
        const keys = keyCounts[entry]?.[Math.floor(queryHead / group)] ?? NaN;
        const limit = Math.ceil(Math.max(0, causal ? keys - behind : keys) / keyBlockTokens);
        return list({ entry, queryHead, limit });
      }),
    ),
  );
  // One tile and one block more than are used.
  const capacity = 1 + Math.max(0, ...lists.flat().map((blocks) => blocks.length));
  const blocks = new Int32Array(queryHeads * (tiles + 1) * capacity).fill(-7);
  const counts = new Int32Array(queryHeads * (tiles + 1)).fill(-7);
  lists.forEach((ofHead, queryHead) => {
    ofHead.forEach((listed, tile) => {
      const at = queryHead * (tiles + 1) + tile;
      blocks.set(listed, at * capacity);
      counts[at] = listed.length;
    });
  });
  return {
    keyBlocks: device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], [queryHeads, tiles + 1, capacity], blocks),
    keyBlockCounts: device.tensor('i32', ['queryHead', 'queryTile'], [queryHeads, tiles + 1], counts),
    attends: (entry: number, queryHead: number, row: number, key: number): boolean => {
      const tile = (firstTile[entry] ?? NaN) + Math.floor(row / listedQueryTile);
      return lists[queryHead]?.[tile]?.includes(Math.floor(key / keyBlockTokens)) ?? false;
    },
  };
}

export const everyBlock = ({ limit }: QueryTile): readonly number[] => Array.from({ length: limit }, (_, block) => block);
