import type { Stream } from '@kv/sparse-core';
import type { Random } from '@kv/sparse-core/testing';
import { placeCodebooks } from '../codebooks/place-codebooks.js';
import { booksOf, type OracleBooks } from './coded-keys-oracle.js';
import { type RandomCodebooks, randomCodebooks } from './random-codebooks.js';

export type BookSizes = Omit<RandomCodebooks, 'layers'>;

/** Random codebooks of one layer on a device, and what the oracle knows of each kv head. */
export async function placedCodebooks(stream: Stream, random: Random, sizes: BookSizes, centroids?: Uint16Array) {
  const drawn = randomCodebooks(random, { layers: 1, ...sizes });
  const codebooks = centroids === undefined ? drawn : { ...drawn, layers: drawn.layers.map((layer) => ({ ...layer, centroids })) };
  const placed = (await placeCodebooks(stream.device, codebooks)).layer(0);
  const { headDim, groups, books, centroids: count, layers: [layer] } = codebooks;
  const oracle = Array.from({ length: sizes.kvHeads }, (_, head): OracleBooks =>
    booksOf({ headDim, groups, books, count }, layer?.centroids ?? new Uint16Array(), layer?.scale ?? new Float32Array(), head),
  );
  return { placed, oracle };
}
