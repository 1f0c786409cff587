/** The blocks of a slot, by kv head and in the order of its sequence: what its rows of the block table say. */
export class SlotBlocks {
  /** i32 `[kvHead, block]`. Behind the blocks of a kv head it says nothing. */
  readonly table: Int32Array;
  /** How many each kv head has. */
  readonly #counts: Int32Array;
  readonly #width: number;

  constructor(kvHeads: number, width: number) {
    this.table = new Int32Array(kvHeads * width);
    this.#counts = new Int32Array(kvHeads);
    this.#width = width;
  }

  /** How many a kv head has. */
  count(kvHead: number): number {
    return this.#counts[kvHead] ?? 0;
  }

  at(kvHead: number, index: number): number | undefined {
    return index < this.count(kvHead) ? this.table[kvHead * this.#width + index] : undefined;
  }

  /** Those of a kv head from `first` on, as they stand in the table. */
  of(kvHead: number, first = 0, end = this.count(kvHead)): Int32Array {
    const row = kvHead * this.#width;
    return this.table.subarray(row + first, row + end);
  }

  /** Those of each kv head, as they stand in the table. */
  get heads(): Int32Array[] {
    return Array.from(this.#counts, (_, kvHead) => this.of(kvHead));
  }

  /** Behind those of a kv head, `ids` from `first` on to before `end`. Makes no view of them: every layer comes here in a step. */
  push(kvHead: number, ids: Int32Array, first = 0, end = ids.length): void {
    const from = kvHead * this.#width + this.count(kvHead) - first;
    for (let index = first; index < end; index++) this.table[from + index] = ids[index] ?? NaN;
    this.#counts[kvHead] = this.count(kvHead) + end - first;
  }

  replace(kvHead: number, index: number, id: number): void {
    this.table[kvHead * this.#width + index] = id;
  }

  /** Takes from a kv head the blocks behind its first `count`. */
  cut(kvHead: number, count: number): Int32Array {
    const cut = this.of(kvHead, count);
    this.#counts[kvHead] = this.count(kvHead) - cut.length;
    return cut;
  }

  /** Takes blocks out of a kv head, from `first` on; those behind them move up. */
  remove(kvHead: number, first: number, count: number): Int32Array {
    const removed = this.of(kvHead, first, first + count).slice();
    this.of(kvHead, first).copyWithin(0, count);
    this.#counts[kvHead] = this.count(kvHead) - removed.length;
    return removed;
  }

  /** Takes the blocks of another slot, the first `counts` of each kv head. */
  copy(from: SlotBlocks, counts: readonly number[]): void {
    this.table.set(from.table);
    this.#counts.set(counts);
  }
}
