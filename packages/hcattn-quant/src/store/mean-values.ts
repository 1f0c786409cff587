import { byteSize, type Device, type FloatDType, type KvLayer, type PagedBlocks, type Stream, type Tensor } from '@kv/sparse-core';
import { bytesOfPool, type HostMemory, madeTogether, type SlotBlocks } from '@kv/sparse-core/native';
import { runningMeans } from '../operations/running-means.js';
import { blockTokens } from '../quantized-blocks.js';
import { listsOf, type NewBlock } from './block-codec.js';

export interface MeanSizes {
  readonly device: Device;
  readonly slots: number;
  readonly layers: readonly KvLayer[];
  /** Of values; the means of so many are in the blocks behind them. */
  readonly blocks: number;
}

/**
 * The mean value of all that a kv head has in codes: a row of the pool of values for each block, of its tokens and of all
 * before it. So the mean of a sequence is that of its last block, whoever shares it and whatever was cut behind it.
 */
export class MeanValues implements Disposable {
  readonly #blocks: number;
  readonly #means: Tensor<FloatDType, readonly ['valueBlock', 'dim']>;
  readonly #sums: Tensor<'f32', readonly ['valueBlock', 'dim']>;
  /** Of each layer, on the device. */
  readonly #rows: readonly Tensor<'i32', readonly ['slot', 'kvHead']>[];

  /** Blocks behind those of values. */
  static blocksFor(blocks: number): number {
    return Math.ceil(blocks / blockTokens);
  }

  /** What it takes of a host pool, beside the blocks behind those of values. */
  static hostBytes(blocks: number, headDim: number): number {
    return bytesOfPool(blocks * headDim * byteSize('f32'));
  }

  /** @throws OutOfMemoryError */
  constructor(hostValues: Tensor<FloatDType | 'i8', readonly ['valueBlock', 'blockToken', 'dim']>, memory: HostMemory, { device, slots, layers, blocks }: MeanSizes) {
    const headDim = hostValues.shape[2];
    const means = hostValues.slice('valueBlock', blocks, hostValues.shape[0]) as Tensor<FloatDType, readonly ['valueBlock', 'blockToken', 'dim']>;
    this.#blocks = blocks;
    this.#means = means.view(['valueBlock', 'dim'], [means.shape[0] * blockTokens, headDim]);
    [this.#sums, this.#rows] = madeTogether((own) => [
      own(memory.tensor('f32', ['valueBlock', 'dim'], [blocks, headDim])),
      layers.map(({ kvHeads }) => own(device.tensor('i32', ['slot', 'kvHead'], [slots, kvHeads], new Int32Array(slots * kvHeads).fill(-1)))),
    ]);
  }

  get deviceBytes(): number {
    return this.#rows.reduce((sum, { byteLength }) => sum + byteLength, 0);
  }

  get hostBytes(): number {
    return this.#sums.byteLength;
  }

  /** Host bytes of a block: its sum and its mean. */
  get blockBytes(): number {
    return this.#means.shape[1] * (byteSize('f32') + byteSize(this.#means.dtype));
  }

  /** Enqueues the means up to each of these blocks. */
  add(stream: Stream, values: PagedBlocks['values'], blocks: readonly NewBlock[]): void {
    const { from, to } = listsOf(blocks);
    const before = blocks.map(({ before: id }) => id ?? -1);
    const counts = blocks.map(({ place }) => place + 1);
    runningMeans(stream, { values, sums: this.#sums, means: this.#means, from, to, before, counts });
  }

  /** Says on the device which mean each kv head of a slot has. */
  write(stream: Stream, layer: number, slot: number, blocks: SlotBlocks): void {
    const rows = blocks.heads.map((held) => this.#blocks * blockTokens + (held.at(-1) ?? NaN));
    const table = this.rowsOf(layer).slice('slot', slot, slot + 1);
    stream.write(table, Int32Array.from(rows, (row) => (Number.isNaN(row) ? -1 : row)));
  }

  rowsOf(layer: number): Tensor<'i32', readonly ['slot', 'kvHead']> {
    const rows = this.#rows[layer];
    if (rows === undefined) throw new RangeError(`there is no layer ${layer}`);
    return rows;
  }

  [Symbol.dispose](): void {
    this.#sums.dispose();
    for (const rows of this.#rows) rows.dispose();
  }
}
