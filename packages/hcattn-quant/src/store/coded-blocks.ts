import { type AttentionPart, type KvBytes, type KvLayer, mergeAttention, type Stream, type Tensor } from '@kv/sparse-core';
import type { BlockIds, SlotBlocks } from '@kv/sparse-core/native';
import { copyValues } from '../operations/copy-values.js';
import { loadValues } from '../operations/load-values.js';
import { selectByMass, type SelectByMassArguments } from '../operations/select-by-mass.js';
import { weightedValues } from '../operations/weighted-values.js';
import { type BlockCodec, type BlockMove, type DenseBlocks, listsOf, type NewBlock, type RowsOverBlocks } from './block-codec.js';
import type { ChoiceRoom } from './choice-room.js';
import type { KeyCodec } from './key-format.js';
import type { HostRows, MeanValues } from './mean-values.js';

/** How rows choose the tokens whose values they read. */
export type Choice = Pick<SelectByMassArguments, 'tau' | 'missingMass'>;

/** The values of all layers' blocks. A block has the same number among its layer's keys. */
export interface ValuePools {
  readonly ids: BlockIds;
  readonly blockBytes: KvBytes;
  /** On the host. */
  readonly hostValues: HostRows;
  /** On the device, of i8 values. */
  readonly valueScales: Tensor<'bf16', readonly ['valueBlock', 'blockToken']> | undefined;
  /** Where they are the values of what is left out. */
  readonly means: MeanValues | undefined;
}

/** Keys of a layer in codes on the device, their values on the host. */
export class CodedBlocks implements BlockCodec {
  readonly ids: BlockIds;
  readonly blockBytes: KvBytes;
  readonly mostRows: number;
  readonly #layer: KvLayer;
  readonly #index: number;
  readonly #keys: KeyCodec;
  readonly #pools: ValuePools;
  readonly #room: ChoiceRoom;
  readonly #choice: Choice;

  /** @param index which layer of the cache it is */
  constructor(layer: KvLayer, index: number, keys: KeyCodec, pools: ValuePools, room: ChoiceRoom, choice: Choice) {
    this.ids = pools.ids;
    this.blockBytes = pools.blockBytes;
    this.mostRows = room.rows;
    this.#layer = layer;
    this.#index = index;
    this.#keys = keys;
    this.#pools = pools;
    this.#room = room;
    this.#choice = choice;
  }

  encode(stream: Stream, { keys, values }: DenseBlocks, blocks: readonly NewBlock[]): void {
    const { hostValues, valueScales, means } = this.#pools;
    const { from, to } = listsOf(blocks);
    this.#keys.encode(stream, keys, blocks);
    copyValues(stream, { values, hostValues, valueScales, from, to });
    means?.add(stream, values, blocks);
  }

  decode(stream: Stream, { keys, values }: DenseBlocks, moves: readonly BlockMove[]): void {
    const { hostValues, valueScales } = this.#pools;
    const { from, to } = listsOf(moves);
    this.#keys.decode(stream, keys, moves);
    loadValues(stream, { values, hostValues, valueScales, from, to });
  }

  write(stream: Stream, slot: number, blocks: SlotBlocks): void {
    this.#pools.means?.write(stream, this.#index, slot, blocks);
  }

  attend(stream: Stream, rows: RowsOverBlocks, part: AttentionPart, { logSumExp }: AttentionPart): void {
    const { hostValues: values, valueScales, means } = this.#pools;
    const { blockTable, keyCounts, slots, queryStart } = rows;
    const { scores, output, ...chosen } = this.#room.of(this.#layer, rows.query.shape[0]);
    this.#keys.score(stream, rows, scores);
    const batch = { blockTable, keyCounts, slots, queryStart, denseLogSumExp: part.logSumExp, scores };
    const pool = { valueBlocks: values.shape[0], valueScales, meanRows: means?.rowsOf(this.#index) };
    selectByMass(stream, { ...batch, ...this.#choice, ...chosen, ...pool, logSumExp });
    weightedValues(stream, { ...chosen, values, output });
    mergeAttention(stream, { ...part, other: { output, logSumExp } });
  }
}
