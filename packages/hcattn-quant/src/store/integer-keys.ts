import type { Device, Stream, Tensor } from '@kv/sparse-core';
import { bitsOf, type IntegerCodec } from '../hc-attention-options.js';
import { dequantizeKv } from '../operations/dequantize-kv.js';
import { quantizedKeyScores } from '../operations/quantized-key-scores.js';
import { quantizeKv } from '../operations/quantize-kv.js';
import { type CodeBits, quantizedBlockBytes } from '../quantized-blocks.js';
import { type BlockMove, listsOf, type RowsOverBlocks } from './block-codec.js';
import type { DenseKeys, KeyCodec, KeyFormat, KeyPool, Scores } from './key-format.js';

/** Keys in integer codes, rotated or plain. */
export function integerKeys(codec: IntegerCodec, rotated: boolean): KeyFormat {
  return {
    name: `${rotated ? '' : 'plain '}${codec} keys over host values`,
    createPool: ([layer], device, blocks) => new IntegerKeys(device, layer?.headDim ?? NaN, blocks, { keyBits: bitsOf[codec], rotated }),
  };
}

/** As operations over codes take it. */
interface Format {
  readonly keyBits: CodeBits;
  readonly rotated: boolean;
}

class IntegerKeys implements KeyPool {
  readonly blockBytes: number;
  readonly #format: Format;
  readonly #quantizedKeys: Tensor<'u8', readonly ['quantizedBlock', 'byte']>;

  /** @throws OutOfMemoryError; CapabilityError for heads that are too large */
  constructor(device: Device, headDim: number, blocks: number, format: Format) {
    this.blockBytes = quantizedBlockBytes(headDim, format.keyBits);
    this.#format = format;
    this.#quantizedKeys = device.tensor('u8', ['quantizedBlock', 'byte'], [blocks, this.blockBytes]);
  }

  get byteLength(): number {
    return this.#quantizedKeys.byteLength;
  }

  codecOf(): KeyCodec {
    const codes = { ...this.#format, quantizedKeys: this.#quantizedKeys };
    return {
      findsRanges: false,
      encode: (stream: Stream, keys: DenseKeys, moves: readonly BlockMove[]) => quantizeKv(stream, { ...codes, keys, ...listsOf(moves) }),
      decode: (stream: Stream, keys: DenseKeys, moves: readonly BlockMove[]) => dequantizeKv(stream, { ...codes, keys, ...listsOf(moves) }),
      score: (stream: Stream, rows: RowsOverBlocks, scores: Scores) => quantizedKeyScores(stream, { ...codes, ...rows, scores }),
    };
  }

  [Symbol.dispose](): void {
    this.#quantizedKeys.dispose();
  }
}
