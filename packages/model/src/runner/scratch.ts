import type { Device, FloatDType, TensorHandle } from '@kv/sparse-core';

import type { ModelConfig } from '../config/model-config.js';

type Rows<Feature extends string> = TensorHandle<FloatDType, readonly ['token', Feature]>;
/** Rows by head. */
export type HeadRows<Head extends string> = TensorHandle<FloatDType, readonly ['token', Head, 'dim']>;

/** What one layer needs beside the hidden rows, for a batch of some rows. */
export interface LayerScratch {
  readonly normed: Rows<'hidden'>;
  readonly queryRows: Rows<'feature'>;
  readonly keyRows: Rows<'feature'>;
  readonly valueRows: Rows<'feature'>;
  readonly attendedRows: Rows<'feature'>;
  /** The same memory by head. */
  readonly query: HeadRows<'queryHead'>;
  readonly key: HeadRows<'kvHead'>;
  readonly value: HeadRows<'kvHead'>;
  readonly attended: HeadRows<'queryHead'>;
  readonly gate: Rows<'feature'>;
  readonly up: Rows<'feature'>;
}

/** Working memory of a runner, allocated once for its largest batch: all layers and batches share it. */
export class Scratch implements Disposable {
  readonly #config: ModelConfig;
  readonly #owned: TensorHandle[] = [];
  readonly #normed: Rows<'hidden'>;
  readonly #projected: Rows<'feature'>;
  readonly #attended: Rows<'feature'>;
  readonly #gate: Rows<'feature'>;
  readonly #up: Rows<'feature'>;

  constructor(device: Device, config: ModelConfig, dtype: FloatDType, maxRows: number) {
    this.#config = config;
    const { hiddenSize, queryHeads, kvHeads, headDim, intermediateSize } = config;
    const allocate = <Feature extends string>(feature: Feature, extent: number): Rows<Feature> => {
      const tensor = device.tensor(dtype, ['token', feature], [maxRows, extent]);
      this.#owned.push(tensor);
      return tensor;
    };
    try {
      this.#normed = allocate('hidden', hiddenSize);
      this.#projected = allocate('feature', (queryHeads + 2 * kvHeads) * headDim);
      this.#attended = allocate('feature', queryHeads * headDim);
      this.#gate = allocate('feature', intermediateSize);
      this.#up = allocate('feature', intermediateSize);
    } catch (error) {
      this[Symbol.dispose]();
      throw error;
    }
  }

  forRows(rows: number): LayerScratch {
    const { queryHeads, kvHeads, headDim } = this.#config;
    const projected = this.#projected.slice('token', 0, rows);
    const firstKey = queryHeads * headDim;
    const firstValue = firstKey + kvHeads * headDim;
    const queryRows = projected.slice('feature', 0, firstKey);
    const keyRows = projected.slice('feature', firstKey, firstValue);
    const valueRows = projected.slice('feature', firstValue, firstValue + kvHeads * headDim);
    const attendedRows = this.#attended.slice('token', 0, rows);
    return {
      normed: this.#normed.slice('token', 0, rows),
      queryRows,
      keyRows,
      valueRows,
      attendedRows,
      query: queryRows.view(['token', 'queryHead', 'dim'], [rows, queryHeads, headDim]),
      key: keyRows.view(['token', 'kvHead', 'dim'], [rows, kvHeads, headDim]),
      value: valueRows.view(['token', 'kvHead', 'dim'], [rows, kvHeads, headDim]),
      attended: attendedRows.view(['token', 'queryHead', 'dim'], [rows, queryHeads, headDim]),
      gate: this.#gate.slice('token', 0, rows),
      up: this.#up.slice('token', 0, rows),
    };
  }

  [Symbol.dispose](): void {
    for (const tensor of this.#owned) tensor.dispose();
  }
}
