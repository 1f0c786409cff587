import { blockTokens, type KvOperand } from '../blocks-24.js';

/** 2:4 pruning of one block in plain steps, for oracles: slow and obviously right. */

/** The places in a `[blockToken, dim]` block of each four neighbours, every group once. */
export function groupsOfFour(operand: KvOperand, headDim: number): number[][] {
  const groups: number[][] = [];
  const [lines, length] = operand === 'keys' ? [blockTokens, headDim] : [headDim, blockTokens];
  const place = (line: number, element: number) =>
    operand === 'keys' ? line * headDim + element : element * headDim + line;
  for (let line = 0; line < lines; line++) {
    for (let first = 0; first < length; first += 4) {
      groups.push([0, 1, 2, 3].map((index) => place(line, first + index)));
    }
  }
  return groups;
}

/** The block with zeros in place of what is not kept: of four neighbours the two of largest magnitude are. */
export function pruned(operand: KvOperand, headDim: number, block: Uint16Array): Uint16Array {
  const result = new Uint16Array(block.length);
  for (const group of groupsOfFour(operand, headDim)) {
    const magnitude = (place: number) => (block[place] ?? 0) & 0x7fff;
    const kept = [...group].sort((a, b) => magnitude(b) - magnitude(a) || a - b).slice(0, 2);
    for (const place of kept) result[place] = block[place] ?? 0;
  }
  return result;
}

/** Where `native/shared/blocks-24/blocks-24.h` says that things lie, read as it is written there. */
const layout = {
  /** Element of the non-zeros that holds number `kept` (of `headDim / 2`) of a key's token. */
  keyNonZero(headDim: number, token: number, kept: number): number {
    const [chunk, within] = [Math.floor(kept / 8), kept % 8];
    const swizzle = headDim === 128 ? token % 8 : Math.floor(token / 2) % 4;
    return token * (headDim / 2) + (chunk ^ swizzle) * 8 + within;
  },
  /** Element that holds, of the values of a dim, kept token number `kept` (of 32). */
  valueNonZero(dim: number, kept: number): number {
    const [panel, chunk, within] = [Math.floor(dim / 64), Math.floor((dim % 64) / 8), dim % 8];
    return panel * 32 * 64 + kept * 64 + (chunk ^ kept % 8) * 8 + within;
  },
  /** The 16 bits about 16 dims of a key's token. */
  keyMeta(metadata: Uint32Array, headDim: number, token: number, group: number): number {
    const [tile, row] = [Math.floor(token / 16), token % 16];
    const lane = 4 * (row % 8) + (group % 4);
    const word = metadata[(tile * 32 + lane) * (headDim / 64) + Math.floor(group / 4)] ?? 0;
    return row < 8 ? word & 0xffff : word >>> 16;
  },
  /** The 16 bits about 16 tokens of a dim of the values. */
  valueMeta(metadata: Uint32Array, dim: number, group: number): number {
    const [tile, row] = [Math.floor(dim / 16), dim % 16];
    const word = metadata[tile * 32 + 4 * (row % 8) + group] ?? 0;
    return row < 8 ? word & 0xffff : word >>> 16;
  },
};

/** A sparse block written out, by the layout above. */
export function expanded(
  operand: KvOperand,
  headDim: number,
  nonZeros: Uint16Array,
  metadata: Uint32Array,
): Uint16Array {
  const block = new Uint16Array(blockTokens * headDim);
  const keys = operand === 'keys';
  const [lines, groups] = keys ? [blockTokens, headDim / 16] : [headDim, blockTokens / 16];
  for (let line = 0; line < lines; line++) {
    for (let group = 0; group < groups; group++) {
      const meta = keys
        ? layout.keyMeta(metadata, headDim, line, group)
        : layout.valueMeta(metadata, line, group);
      for (let n = 0; n < 8; n++) {
        const element = 16 * group + 4 * Math.floor(n / 2) + ((meta >>> (2 * n)) & 3);
        const kept = 8 * group + n;
        const from = keys ? layout.keyNonZero(headDim, line, kept) : layout.valueNonZero(line, kept);
        block[keys ? line * headDim + element : element * headDim + line] = nonZeros[from] ?? 0;
      }
    }
  }
  return block;
}
