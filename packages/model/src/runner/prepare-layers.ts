import type { RowBatch, Stream } from '@kv/sparse-core';

import type { LayerRunner } from './layer-runner.js';

/**
 * Makes room for a step in every layer, or in none.
 * @throws OutOfMemoryError when one of them has no room
 */
export function prepareLayers(stream: Stream, layers: readonly LayerRunner[], batch: RowBatch): void {
  const prepared: LayerRunner[] = [];
  try {
    for (const layer of layers) {
      layer.store.prepare(stream, batch);
      prepared.push(layer);
    }
  } catch (error) {
    for (const { store } of prepared) {
      for (const { slot } of batch.entries) store.truncate(stream, slot, 0);
    }
    throw error;
  }
}
