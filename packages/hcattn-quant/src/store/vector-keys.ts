import type { Device, KvLayer, Stream, Tensor } from '@kv/sparse-core';
import { codeBitsOf, expectCodebooksOf } from '../codebooks/codebooks.js';
import { expectPlacedOn, type PlacedCodebooks } from '../codebooks/place-codebooks.js';
import { codedBlockBytes } from '../coded-keys.js';
import { codedKeyScores } from '../operations/coded-key-scores.js';
import { decodeKeys } from '../operations/decode-keys.js';
import { encodeKeys } from '../operations/encode-keys.js';
import { type BlockMove, listsOf, type RowsOverBlocks } from './block-codec.js';
import type { DenseKeys, KeyCodec, KeyFormat, KeyPool, Ranges, Scores } from './key-format.js';

/** Keys in codes of codebooks. */
export function vectorKeys(placed: PlacedCodebooks): KeyFormat {
  return {
    name: `${placed.codebooks.groups} groups`,
    createPool(layers, device, blocks) {
      expectPlacedOn('hcAttentionStore', placed, device);
      expectCodebooksOf('hcAttentionStore', placed.codebooks, layers);
      return new VectorKeys(placed, device, blocks);
    },
  };
}

class VectorKeys implements KeyPool {
  readonly blockBytes: number;
  readonly #placed: PlacedCodebooks;
  readonly #codedKeys: Tensor<'u8', readonly ['codedBlock', 'byte']>;

  constructor(placed: PlacedCodebooks, device: Device, blocks: number) {
    const { groups, centroids } = placed.codebooks;
    this.blockBytes = codedBlockBytes(groups, codeBitsOf(centroids));
    this.#placed = placed;
    this.#codedKeys = device.tensor('u8', ['codedBlock', 'byte'], [blocks, this.blockBytes]);
  }

  get byteLength(): number {
    return this.#codedKeys.byteLength;
  }

  codecOf(_layer: KvLayer, index: number): KeyCodec {
    const codes = { ...this.#placed.layer(index), codedKeys: this.#codedKeys };
    return {
      findsRanges: true,
      encode: (stream: Stream, keys: DenseKeys, moves: readonly BlockMove[]) =>
        encodeKeys(stream, { ...codes, keys, ...listsOf(moves) }),
      decode: (stream: Stream, keys: DenseKeys, moves: readonly BlockMove[]) =>
        decodeKeys(stream, { ...codes, keys, ...listsOf(moves) }),
      score(stream: Stream, rows: RowsOverBlocks, scores: Scores, ranges: Ranges | undefined) {
        const [first, end] = [rows.firstKvHead, rows.firstKvHead + rows.blockTable.shape[1]];
        const centroids = codes.centroids.slice('kvHead', first, end);
        const channelScale = codes.channelScale?.slice('kvHead', first, end);
        codedKeyScores(stream, { ...codes, ...rows, centroids, channelScale, scores, ranges });
      },
    };
  }

  [Symbol.dispose](): void {
    this.#codedKeys.dispose();
  }
}
