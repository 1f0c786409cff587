import type { KvCapacity, KvLayer } from '../contracts/kv-store.js';
import { entriesOf, type RowBatch } from '../contracts/row-batch.js';
import { InvalidValueError } from '../errors.js';
import type { Stream, Tensor, TensorHandle } from '../handles.js';
import { madeTogether } from '../made-together.js';
import { show } from '../show.js';
import { nativeOf } from '../tensor.js';
import { listOf } from '../validate.js';
import { zeroTable } from './zero-table.js';

export type BlockTable = Tensor<'i32', readonly ['slot', 'kvHead', 'block']>;

export interface SlotTableOptions<Blocks, Name extends string> {
  readonly layer: KvLayer;
  readonly capacity: KvCapacity;
  /** Consecutive tokens of one kv head in a block. */
  readonly blockTokens: number;
  /** The names of the block tables. */
  readonly tables: readonly Name[];
  /** The blocks of an empty slot, of which each kv head will have at most so many. */
  readonly empty: (mostBlocks: number) => Blocks;
  /** Block tables of zeros that somebody else disposes of. Default: it makes its own. */
  readonly given?: Readonly<Record<Name, BlockTable>> | undefined;
}

interface Slot<Blocks, Name extends string> {
  readonly blocks: Blocks;
  /** Tokens of each kv head, without its new rows. */
  lengths: readonly number[];
  /** Its rows of the tables, made when they are first written. */
  readonly rows: Partial<Record<Name | 'counts', TensorHandle<'i32'>>>;
}

/**
 * The slots of a store: the blocks of each, on the host, how many tokens they hold, on the host and on the device, and
 * the block tables on the device, which the store writes. A slot costs nothing on the host before it is first used.
 */
export class SlotTable<Blocks, Name extends string> {
  /** Of zeros when made. */
  readonly tables: Readonly<Record<Name, BlockTable>>;
  /** i32 `[slot, kvHead]`: tokens. */
  readonly keyCounts: Tensor<'i32', readonly ['slot', 'kvHead']>;
  readonly #blockTokens: number;
  /** Blocks of the longest sequence. */
  readonly #width: number;
  readonly #emptySlot: () => Slot<Blocks, Name>;
  /** Those that were used. */
  readonly #slots = new Map<number, Slot<Blocks, Name>>();
  /** Of each slot, rows that were counted since somebody asked for its lengths. Every layer counts all of a step. */
  readonly #newRows: Int32Array;
  /** Of each slot, rows that certainly fit: as many as the store said, less those that came. */
  readonly #room: Int32Array;

  /** @throws OutOfMemoryError */
  constructor({ layer, capacity, blockTokens, tables, empty, given }: SlotTableOptions<Blocks, Name>) {
    const { device, slots, tokensPerSlot } = capacity;
    const { kvHeads } = layer;
    const width = Math.ceil(tokensPerSlot / blockTokens);
    this.#blockTokens = blockTokens;
    this.#width = width;
    const table = () => zeroTable(device, ['slot', 'kvHead', 'block'], [slots, kvHeads, width]);
    [this.tables, this.keyCounts] = madeTogether((own) => [
      given ?? (Object.fromEntries(tables.map((name) => [name, own(table())])) as Record<Name, BlockTable>),
      own(zeroTable(device, ['slot', 'kvHead'], [slots, kvHeads])),
    ]);
    this.#newRows = new Int32Array(slots);
    this.#room = new Int32Array(slots);
    this.#emptySlot = () => ({ blocks: empty(width), lengths: Array.from({ length: kvHeads }, () => 0), rows: {} });
  }

  get slots(): number {
    return this.keyCounts.shape[0];
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
    const found = this.#slot(slot);
    const newRows = this.#newRows[slot] ?? 0;
    if (newRows > 0) {
      found.lengths = found.lengths.map((count) => count + newRows);
      this.#newRows[slot] = 0;
    }
    return found.lengths;
  }

  /** One of these, without a list of them. */
  length(slot: number, kvHead: number): number {
    return (this.#slot(slot).lengths[kvHead] ?? 0) + (this.#newRows[slot] ?? 0);
  }

  /** @throws DeviceError, DisposedError unless work of the store can be enqueued there */
  expectUsable(operation: string, stream: Stream): void {
    nativeOf(operation, 'the store', this.keyCounts, stream);
  }

  /**
   * The blocks of a slot.
   * @throws InvalidValueError when there is no such slot
   */
  blocks(slot: number): Blocks {
    return this.#slot(slot).blocks;
  }

  /** Of all slots that were used, or of these. */
  allBlocks(slots: readonly number[] = [...this.#slots.keys()]): Blocks[] {
    return listOf('the store', 'slots', slots, this.slots).map((slot) => this.blocks(slot));
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
    // A loop that makes nothing: every layer comes here with every sequence of a step.
    for (const { slot, rows } of entriesOf('advance', batch)) {
      const [newRows, room] = [this.#newRows[slot], this.#room[slot]];
      if (newRows === undefined || room === undefined) throw this.#noSlot(slot);
      this.#newRows[slot] = newRows + rows;
      this.#room[slot] = room - rows;
    }
  }

  /** Says on the host what a slot holds now; an operation says it on the device. */
  count(slot: number, lengths: readonly number[]): void {
    this.#slot(slot).lengths = [...lengths];
    this.#newRows[slot] = 0;
    this.#room[slot] = 0;
  }

  /** Has the slot known to have room for so many rows, until what it holds changes otherwise than by rows that come. */
  keepRoom(slot: number, rows: number): void {
    this.#room[slot] = rows;
  }

  /** @throws InvalidValueError when there is no such slot */
  hasRoom(slot: number, rows: number): boolean {
    const room = this.#room[slot];
    if (room === undefined) throw this.#noSlot(slot);
    return rows <= room;
  }

  /** Says on the host and on the device what a slot holds now. */
  write(stream: Stream, slot: number, lengths: readonly number[]): void {
    stream.write(this.#rowOf('counts', this.keyCounts, slot), Int32Array.from(lengths));
    this.count(slot, lengths);
  }

  /** Says on the device which blocks a slot has. */
  writeTable(stream: Stream, name: Name, slot: number, blocks: Int32Array): void {
    stream.write(this.#rowOf(name, this.tables[name], slot), blocks);
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

  #rowOf(name: Name | 'counts', table: TensorHandle<'i32', readonly ['slot', ...string[]]>, slot: number): TensorHandle<'i32'> {
    const { rows } = this.#slot(slot);
    return (rows[name] ??= table.slice('slot', slot, slot + 1));
  }

  #slot(slot: number): Slot<Blocks, Name> {
    const used = this.#slots.get(slot);
    if (used !== undefined) return used;
    if (!Number.isInteger(slot) || slot < 0 || slot >= this.slots) throw this.#noSlot(slot);
    const empty = this.#emptySlot();
    this.#slots.set(slot, empty);
    return empty;
  }

  #noSlot(slot: number): InvalidValueError {
    return new InvalidValueError(`Slot ${show(slot)} does not exist; the cache has ${this.slots}.`, {
      subject: 'slot',
      given: slot,
      wanted: this.slots,
    });
  }

  get #tables(): BlockTable[] {
    return Object.values(this.tables);
  }
}
