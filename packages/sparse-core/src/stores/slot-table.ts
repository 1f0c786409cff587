import type { KvCapacity, KvLayer } from '../contracts/kv-store.js';
import { entriesOf, type RowBatch } from '../contracts/row-batch.js';
import { InvalidValueError } from '../errors.js';
import { madeTogether } from '../made-together.js';
import type { Stream } from '../stream.js';
import { show } from '../show.js';
import type { Tensor } from '../tensor.js';
import { listOf, nativeOf } from '../validate.js';
import { zeroTable } from './zero-table.js';

export type BlockTable = Tensor<'i32', readonly ['slot', 'kvHead', 'block']>;

export interface SlotTableOptions<Blocks, Name extends string> {
  readonly layer: KvLayer;
  readonly capacity: KvCapacity;
  /** Consecutive tokens of one kv head in a block. */
  readonly blockTokens: number;
  /** The names of the block tables. */
  readonly tables: readonly Name[];
  /** What a kv head of an empty slot holds. */
  readonly empty: () => Blocks;
}

/**
 * The slots of a store: what each kv head of each holds, on the host, how many tokens that is, on the host and on the
 * device, and the block tables on the device, which the store writes.
 */
export class SlotTable<Blocks, Name extends string> {
  /** Of zeros when made. */
  readonly tables: Readonly<Record<Name, BlockTable>>;
  /** i32 `[slot, kvHead]`: tokens. */
  readonly keyCounts: Tensor<'i32', readonly ['slot', 'kvHead']>;
  readonly #blockTokens: number;
  /** Blocks of the longest sequence. */
  readonly #width: number;
  readonly #heads: Blocks[][];
  readonly #lengths: (readonly number[])[];

  /** @throws OutOfMemoryError */
  constructor({ layer, capacity, blockTokens, tables, empty }: SlotTableOptions<Blocks, Name>) {
    const { device, slots, tokensPerSlot } = capacity;
    const { kvHeads } = layer;
    const width = Math.ceil(tokensPerSlot / blockTokens);
    this.#blockTokens = blockTokens;
    this.#width = width;
    const table = () => zeroTable(device, ['slot', 'kvHead', 'block'], [slots, kvHeads, width]);
    [this.tables, this.keyCounts] = madeTogether((own) => [
      Object.fromEntries(tables.map((name) => [name, own(table())])) as Record<Name, BlockTable>,
      own(zeroTable(device, ['slot', 'kvHead'], [slots, kvHeads])),
    ]);
    this.#heads = Array.from({ length: slots }, () => Array.from({ length: kvHeads }, empty));
    this.#lengths = Array.from({ length: slots }, () => Array.from({ length: kvHeads }, () => 0));
  }

  get slots(): number {
    return this.#heads.length;
  }

  get disposed(): boolean {
    return this.keyCounts.disposed;
  }

  get byteLength(): number {
    return this.#tables.reduce((sum, table) => sum + table.byteLength, this.keyCounts.byteLength);
  }

  /**
   * Tokens that a slot holds, per kv head.
   * @throws InvalidValueError when there is no such slot
   */
  lengths(slot: number): readonly number[] {
    const lengths = typeof slot === 'number' ? this.#lengths[slot] : undefined;
    if (lengths !== undefined) return lengths;
    throw new InvalidValueError(`Slot ${show(slot)} does not exist; the cache has ${this.slots}.`, {
      subject: 'slot',
      given: slot,
      wanted: this.slots,
    });
  }

  /** @throws DeviceError, DisposedError unless work of the store can be enqueued there */
  expectUsable(operation: string, stream: Stream): void {
    nativeOf(operation, 'the store', this.keyCounts, stream);
  }

  /**
   * What a slot holds, per kv head.
   * @throws InvalidValueError when there is no such slot
   */
  heads(slot: number): readonly Blocks[] {
    this.lengths(slot);
    return this.#heads[slot] ?? [];
  }

  /** Of all slots, or of these. */
  allHeads(slots: readonly number[] = [...this.#heads.keys()]): Blocks[] {
    return listOf('the store', 'slots', slots, this.slots).flatMap((slot) => this.heads(slot));
  }

  /**
   * How many blocks hold so many tokens.
   * @throws InvalidValueError when a sequence cannot have so many
   */
  blocksFor(slot: number, tokens: number): number {
    const blocks = Math.ceil(tokens / this.#blockTokens);
    if (blocks <= this.#width) return blocks;
    const limit = this.#width * this.#blockTokens;
    throw new InvalidValueError(
      `Slot ${slot} would hold ${tokens} tokens; its sequence may have ${limit}. ` +
        'Open the model with a larger contextTokens.',
      { subject: 'tokens', given: tokens, wanted: limit },
    );
  }

  /** Counts a step's rows on the host; an operation counts them on the device. */
  advance(batch: RowBatch): void {
    for (const { slot, rows } of entriesOf('advance', batch)) {
      this.count(
        slot,
        this.lengths(slot).map((count) => count + rows),
      );
    }
  }

  /** Says on the host what a slot holds now; an operation says it on the device. */
  count(slot: number, lengths: readonly number[]): void {
    this.#lengths[slot] = [...lengths];
  }

  /** Says on the host and on the device what a slot holds now. */
  write(stream: Stream, slot: number, lengths: readonly number[]): void {
    stream.write(this.keyCounts.slice('slot', slot, slot + 1), Int32Array.from(lengths));
    this.count(slot, lengths);
  }

  /** @throws InvalidValueError when a slot holds tokens, or does not exist */
  expectEmpty(slot: number): void {
    if (this.lengths(slot).every((count) => count === 0)) return;
    throw new InvalidValueError(`Slot ${slot} holds tokens; copy into an empty one, or release it first.`, {
      subject: 'toSlot',
      given: slot,
    });
  }

  dispose(): void {
    for (const table of this.#tables) table.dispose();
    this.keyCounts.dispose();
  }

  get #tables(): BlockTable[] {
    return Object.values(this.tables);
  }
}
