import { type AttentionPart, type FloatDType, type KvBytes, type KvLayer, mergeAttention, type Stream, type Tensor } from '@kv/sparse-core';
import type { BlockIds } from '@kv/sparse-core/native';
import type { PlacedLayer } from '../codebooks/place-codebooks.js';
import { codedKeyScores } from '../operations/coded-key-scores.js';
import { copyValues } from '../operations/copy-values.js';
import { decodeKeys } from '../operations/decode-keys.js';
import { encodeKeys } from '../operations/encode-keys.js';
import { loadValues } from '../operations/load-values.js';
import { selectByMass, type SelectByMassArguments } from '../operations/select-by-mass.js';
import { weightedValues } from '../operations/weighted-values.js';
import { type BlockCodec, type BlockMove, type DenseBlocks, listsOf, type RowsOverBlocks } from './block-codec.js';
import type { ChoiceRoom } from './choice-room.js';

/** How rows choose the tokens whose values they read. */
export type Choice = Pick<SelectByMassArguments, 'tau' | 'missingMass'>;

/** Blocks of all layers. A block has the same number among keys and among values. */
export interface CodedPools {
  readonly ids: BlockIds;
  readonly blockBytes: KvBytes;
  readonly codedKeys: Tensor<'u8', readonly ['codedBlock', 'byte']>;
  /** On the host. */
  readonly hostValues: Tensor<FloatDType | 'i8', readonly ['valueBlock', 'blockToken', 'dim']>;
  /** On the device, of i8 values. */
  readonly valueScales: Tensor<'bf16', readonly ['valueBlock', 'blockToken']> | undefined;
}

/** Keys of a layer in codes on the device, their values on the host. */
export class CodedBlocks implements BlockCodec {
  readonly ids: BlockIds;
  readonly blockBytes: KvBytes;
  readonly mostRows: number;
  readonly #layer: KvLayer;
  readonly #codebooks: PlacedLayer;
  readonly #pools: CodedPools;
  readonly #room: ChoiceRoom;
  readonly #choice: Choice;

  constructor(layer: KvLayer, codebooks: PlacedLayer, pools: CodedPools, room: ChoiceRoom, choice: Choice) {
    this.ids = pools.ids;
    this.blockBytes = pools.blockBytes;
    this.mostRows = room.rows;
    this.#layer = layer;
    this.#codebooks = codebooks;
    this.#pools = pools;
    this.#room = room;
    this.#choice = choice;
  }

  encode(stream: Stream, { keys, values }: DenseBlocks, moves: readonly BlockMove[]): void {
    const { codedKeys, hostValues, valueScales } = this.#pools;
    const { kvHeads, ...copies } = listsOf(moves);
    encodeKeys(stream, { ...this.#codebooks, codedKeys, keys, kvHeads, ...copies });
    copyValues(stream, { values, hostValues, valueScales, ...copies });
  }

  decode(stream: Stream, { keys, values }: DenseBlocks, moves: readonly BlockMove[]): void {
    const { codedKeys, hostValues, valueScales } = this.#pools;
    const { kvHeads, ...copies } = listsOf(moves);
    decodeKeys(stream, { ...this.#codebooks, codedKeys, keys, kvHeads, ...copies });
    loadValues(stream, { values, hostValues, valueScales, ...copies });
  }

  attend(stream: Stream, rows: RowsOverBlocks, part: AttentionPart, { logSumExp }: AttentionPart): void {
    const { codedKeys, hostValues: values, valueScales, ids } = this.#pools;
    const { blockTable, keyCounts, slots, queryStart } = rows;
    const { scores, output, ...chosen } = this.#room.of(this.#layer, rows.query.shape[0]);
    codedKeyScores(stream, { ...this.#codebooks, ...rows, codedKeys, scores });
    const batch = { blockTable, keyCounts, slots, queryStart, denseLogSumExp: part.logSumExp, scores };
    selectByMass(stream, { ...batch, ...this.#choice, ...chosen, valueBlocks: ids.count, valueScales, logSumExp });
    weightedValues(stream, { ...chosen, values, output });
    mergeAttention(stream, { ...part, other: { output, logSumExp } });
  }
}
