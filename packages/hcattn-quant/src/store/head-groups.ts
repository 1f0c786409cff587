import type { KvCapacity, KvLayer, Stream } from '@kv/sparse-core';
import { type SlotBlocks, SlotTable } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';
import type { RowsOverBlocks } from './block-codec.js';

/** Tokens of a cache for each group: of fewer, the kernels and the host part of a group cost more than they hide. */
const tokensOfGroup = 2 ** 18;
/** How large groups are, by how many there is work for. */
const sizes = [[1], [1, 1], [1, 1, 1], [2, 2, 2, 2]] as const;

/** Where the groups of a layer's kv heads begin, and the last one ends. */
export function headBoundsOf({ kvHeads }: Pick<KvLayer, 'kvHeads'>, { tokens, slots, tokensPerSlot }: KvCapacity): readonly number[] {
  const groups = Math.floor(Math.min(tokens, slots * tokensPerSlot) / tokensOfGroup);
  const parts = sizes[Math.max(0, Math.min(groups, sizes.length) - 1)] ?? sizes[0];
  const all = parts.reduce((sum: number, part) => sum + part, 0);
  let end = 0;
  return [...new Set([0, ...parts.map((part) => Math.round(((end += part) * kvHeads) / all))])];
}

/** The kv heads of a layer in groups of neighbours: what one group reads is summed on the host while the next is scored. */
export class HeadGroups implements Disposable {
  readonly #layer: KvLayer;
  /** Of each group, which blocks its kv heads have: operations take tables without gaps. */
  readonly #tables: readonly SlotTable<undefined, 'blocks'>[];
  readonly #bounds: readonly number[];

  /** @throws OutOfMemoryError */
  constructor(layer: KvLayer, capacity: KvCapacity, bounds: readonly number[]) {
    this.#layer = layer;
    this.#bounds = bounds;
    const options = { capacity, blockTokens, tables: ['blocks'], empty: () => undefined } as const;
    const tables: SlotTable<undefined, 'blocks'>[] = [];
    this.#tables = tables;
    try {
      while (tables.length < bounds.length - 1) {
        const [first, end] = this.#boundsOf(tables.length);
        tables.push(new SlotTable<undefined, 'blocks'>({ ...options, layer: { ...layer, kvHeads: end - first } }));
      }
    } catch (error) {
      this[Symbol.dispose]();
      throw error;
    }
  }

  get byteLength(): number {
    return this.#tables.reduce((sum, { byteLength }) => sum + byteLength, 0);
  }

  /** Says on the device which blocks a slot has. */
  write(stream: Stream, slot: number, { table, heads }: SlotBlocks): void {
    const width = table.length / this.#layer.kvHeads;
    this.#tables.forEach(({ tables }, group) => {
      const [first, end] = this.#boundsOf(group);
      stream.write(tables.blocks.slice('slot', slot, slot + 1), table.subarray(first * width, end * width));
      this.#tables[group]?.write(stream, slot, heads.slice(first, end).map(({ length }) => length * blockTokens));
    });
  }

  /** The rows of each group. */
  of(rows: RowsOverBlocks): RowsOverBlocks[] {
    const group = this.#layer.queryHeads / this.#layer.kvHeads;
    return this.#tables.map(({ tables, keyCounts }, index) => {
      const [first, end] = this.#boundsOf(index);
      return {
        ...rows,
        query: rows.query.slice('queryHead', first * group, end * group),
        blockTable: tables.blocks,
        keyCounts,
        firstKvHead: first,
      };
    });
  }

  #boundsOf(group: number): [first: number, end: number] {
    return [this.#bounds[group] ?? 0, this.#bounds[group + 1] ?? 0];
  }

  [Symbol.dispose](): void {
    for (const table of this.#tables) table.dispose();
  }
}
