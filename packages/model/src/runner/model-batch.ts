import { InvalidValueError } from '@kv/sparse-core';
import type { Device, FloatDType, KvBytes, PrefillReport, Stream, TensorHandle } from '@kv/sparse-core';
import { madeTogether } from '@kv/sparse-core/native';

import { countTokens } from './batch-entry.js';
import type { BatchEntry, DeviceIds } from './batch-entry.js';
import { bytesOfChunk, cutEntries, disposeChunk, makeChunk } from './batch-chunk.js';
import type { BatchChunk, ChunkEntry } from './batch-chunk.js';
import { HiddenRows } from './hidden-rows.js';

export interface BatchSizes {
  readonly hiddenSize: number;
  readonly dtype: FloatDType;
  /** Rows of a chunk at most: a prompt that is longer goes through each layer in several. */
  readonly chunkRows: number;
}

/**
 * The rows of one step on their way through the layers: entry by entry, those of prompts before those of
 * answers. Made by `Runner.createBatch`.
 */
export class ModelBatch implements Disposable {
  /** In the order of the rows. */
  readonly entries: readonly BatchEntry[];
  /** In the order of the rows: one, or several of a long prompt. */
  readonly chunks: readonly BatchChunk[];
  readonly rows: number;
  /** i32 `[token]` */
  readonly ids: TensorHandle<'i32', readonly ['token']>;
  /** What the layers so far made of the rows. */
  readonly hiddenRows: HiddenRows;
  /** The layer that runs next; -1 before `embed`. */
  nextLayer = -1;
  /** What the prefill attention of each layer did. Nobody has to wait for those that are yet to arrive. */
  readonly reports: (PrefillReport | Promise<PrefillReport>)[] = [];
  readonly #given: readonly BatchEntry[];
  /** Chunks that have passed the next layer. */
  #passed = 0;

  constructor(device: Device, stream: Stream, given: readonly BatchEntry[], { hiddenSize, dtype, chunkRows }: BatchSizes) {
    this.#given = given;
    const prompts = given.filter(({ phase }) => phase !== 'decode');
    const answers = given.filter(({ phase }) => phase === 'decode');
    const entries = [...prompts, ...answers];
    const cut = cutEntries(entries.map(toChunkEntry), chunkRows);
    this.entries = entries;
    this.rows = entries.reduce((sum, entry) => sum + countTokens(entry), 0);
    let firstRow = 0;
    const made = madeTogether((own) => ({
      chunks: cut.map((part) => {
        const chunk = makeChunk(device, stream, own, part, firstRow);
        firstRow += chunk.rows.rows;
        return chunk;
      }),
      ids: packIds(device, stream, own, entries, this.rows),
      hiddenRows: own(new HiddenRows(device, dtype, this.rows, hiddenSize)),
    }));
    ({ chunks: this.chunks, ids: this.ids, hiddenRows: this.hiddenRows } = made);
  }

  /** `[token, hidden]`: what the layers so far made of the rows. */
  get hidden(): TensorHandle<FloatDType, readonly ['token', 'hidden']> {
    return this.hiddenRows.tensor;
  }

  /** The rows that go through the next layer next. */
  get nextChunk(): BatchChunk {
    const chunk = this.chunks[this.#passed];
    if (chunk === undefined) throw new Error('a layer is left behind its last chunk');
    return chunk;
  }

  /** The first of these rows. */
  get nextRow(): number {
    return this.nextChunk.firstRow;
  }

  /** How many they are. */
  get nextRows(): number {
    return this.nextChunk.rows.rows;
  }

  /** What the batch takes: its rows and what says whose they are. */
  get bytes(): KvBytes {
    const { device, host } = this.hiddenRows.bytes;
    return { device: device + this.chunks.reduce((sum, chunk) => sum + bytesOfChunk(chunk), this.ids.byteLength), host };
  }

  /** The last row of each entry, in the order in which `createBatch` was given them. */
  get lastRows(): number[] {
    const ends = new Map<BatchEntry, number>();
    let end = 0;
    for (const entry of this.entries) ends.set(entry, (end += countTokens(entry)));
    return this.#given.map((entry) => (ends.get(entry) ?? 0) - 1);
  }

  /**
   * @param layer of so many; -1 stands for `embed`, and the one behind the last for `head`
   * @throws InvalidValueError unless it is the batch's next step
   */
  assertNext(layer: number, layers: number): void {
    if (this.nextLayer === layer) return;
    const say = (at: number): string => (at < 0 ? 'embed' : at < layers ? `layer ${at}` : 'head');
    throw new InvalidValueError(
      `The batch's next step is ${say(this.nextLayer)}, not ${say(layer)}. Run the steps in order.`,
      { subject: 'layer', given: layer, wanted: this.nextLayer },
    );
  }

  /** @throws InvalidValueError unless all sequences are where they were when the batch was made */
  assertTurn(): void {
    const [first] = this.chunks;
    for (const { sequence, position } of first?.entries ?? []) sequence.assertTurn(this, position);
  }

  /** The next chunk has passed so many layers: a batch of several chunks one at a time. */
  pass(layers: number): void {
    this.#passed = (this.#passed + 1) % this.chunks.length;
    if (this.#passed === 0) this.nextLayer += layers;
  }

  dispose(): void {
    for (const chunk of this.chunks) disposeChunk(chunk);
    this.ids.dispose();
    this.hiddenRows[Symbol.dispose]();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}

function toChunkEntry(entry: BatchEntry): ChunkEntry {
  const { sequence, phase } = entry;
  return { sequence, phase, position: sequence.length, rows: countTokens(entry) };
}

type Own = <Kind extends Disposable>(made: Kind) => Kind;

function packIds(
  device: Device,
  stream: Stream,
  own: Own,
  entries: readonly BatchEntry[],
  rows: number,
): TensorHandle<'i32', readonly ['token']> {
  const known = new Int32Array(rows);
  const chosen: { ids: DeviceIds; row: number }[] = [];
  let row = 0;
  for (const entry of entries) {
    if ('dtype' in entry.ids) chosen.push({ ids: entry.ids, row });
    else known.set(entry.ids, row);
    row += countTokens(entry);
  }
  const packed = own(device.tensor('i32', ['token'], [known.length], known));
  for (const { ids, row: start } of chosen) {
    stream.copy(ids, packed.slice('token', start, start + ids.shape[0]));
  }
  return packed;
}
