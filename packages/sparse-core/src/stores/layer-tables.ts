import type { KvCapacity, KvLayer } from '../contracts/kv-store.js';
import type { Stream, Tensor } from '../handles.js';
import { writeEntries } from '../operations/write-entries.js';
import type { BlockTable } from './slot-table.js';
import { zeroTable } from './zero-table.js';

/** The block tables of several layers in one tensor: what a step adds to all of them is one call. */
export class LayerTables implements Disposable {
  readonly #all: Tensor<'i32', readonly ['entry']>;
  readonly #width: number;
  /** Where the table of each layer begins. */
  readonly #first: readonly number[];
  readonly #kvHeads: readonly number[];
  readonly #slots: number;
  #at: number[] = [];
  #entries: number[] = [];

  /** @throws OutOfMemoryError */
  constructor(layers: readonly KvLayer[], { device, slots, tokensPerSlot }: KvCapacity, blockTokens: number) {
    this.#slots = slots;
    this.#width = Math.ceil(tokensPerSlot / blockTokens);
    this.#kvHeads = layers.map(({ kvHeads }) => kvHeads);
    let entries = 0;
    this.#first = this.#kvHeads.map((kvHeads) => (entries += slots * kvHeads * this.#width) - slots * kvHeads * this.#width);
    this.#all = zeroTable(device, ['entry'], [entries]);
  }

  /** That of a layer, by its place among them. */
  of(layer: number): BlockTable {
    const [first = NaN, kvHeads = NaN] = [this.#first[layer], this.#kvHeads[layer]];
    const shape = [this.#slots, kvHeads, this.#width] as const;
    return this.#all.slice('entry', first, first + this.#slots * kvHeads * this.#width).view(['slot', 'kvHead', 'block'], shape);
  }

  /** Says which blocks a kv head of a slot has from `index` on, with the next `write`: `blocks` from `first` on to before `end`. */
  set(layer: number, slot: number, kvHead: number, index: number, blocks: Int32Array, first: number, end: number): void {
    const row = (this.#first[layer] ?? NaN) + (slot * (this.#kvHeads[layer] ?? NaN) + kvHead) * this.#width + index;
    for (let block = first; block < end; block++) {
      this.#at.push(row + block - first);
      this.#entries.push(blocks[block] ?? NaN);
    }
  }

  /** Enqueues all that was said since the last time. */
  write(stream: Stream): void {
    if (this.#at.length === 0) return;
    const [at, entries] = [new Int32Array(this.#at), new Int32Array(this.#entries)];
    [this.#at, this.#entries] = [[], []];
    writeEntries(stream, { table: this.#all, at, entries });
  }

  [Symbol.dispose](): void {
    this.#all.dispose();
  }
}
