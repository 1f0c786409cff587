/** The kinds of blocks that tables can name, as `native/shared/paged/block-entry.h` writes them. */
const kinds = { dense: 0, sparse24: 8 } as const;
export type BlockKind = keyof typeof kinds;

/** What a table says where there is no block. */
export const noBlock = -1;

const shift = 28; // bits of the number of a block that is not dense

/** How many blocks of a kind entries can name. */
export function mostBlocks(kind: BlockKind): number {
  return kind === 'dense' ? 2 ** 31 - 1 : 2 ** shift;
}

/** What a block table says of a block: its kind, and its number in the pool of that kind. A dense block's is its number. */
export function blockEntry(kind: BlockKind, number: number): number {
  return (kinds[kind] << shift) | number;
}

/** Whether an entry names a dense block. */
export function isDense(entry: number): boolean {
  return entry >= 0;
}

/** The number of the block that an entry names. */
export function blockNumber(entry: number): number {
  return isDense(entry) ? entry : entry & (2 ** shift - 1);
}
