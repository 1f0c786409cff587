import {
  byteSize,
  type FloatDType,
  type KvCapacity,
  type KvLayer,
  type Stream,
  type Tensor,
  type TensorHandle,
} from '@kv/sparse-core';
import { expectDType, expectShape, expectThat, floats, KvBlockPool, madeTogether, nativeOf } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';

type Rows = TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
type LogSumExp = Tensor<'f32', readonly ['token', 'queryHead']>;

/** Room of rows for attention in two parts: log-sum-exps of either, and the output of the second. */
export interface AttentionParts {
  readonly logSumExp: LogSumExp;
  readonly second: { readonly output: Rows; readonly logSumExp: LogSumExp };
}

/** Blocks of each kv head that are made dense at once, where a sequence has as many. */
const mostDenseBlocks = 64;

/** The same of what comes over the link: the fewer the pieces, the fewer the merges. */
const mostFetchedBlocks = 512;

/** What attention over codes works in. All layers of a cache share it: their work is in stream order. */
export class AttentionScratch {
  /** Blocks of earlier tokens that a prompt attends to, made dense piece by piece. */
  readonly pool: KvBlockPool;
  /** Blocks for each kv head in a half of the pool. */
  readonly blocksOfHead: number;
  /** Of the pool: while one is attended to, the other is filled. One where nothing comes over the link. */
  readonly halves: 1 | 2;
  readonly #outputs: Tensor<'u8', readonly ['byte']>;
  readonly #logSumExps: Tensor<'f32', readonly ['part', 'element']>;

  /** @throws OutOfMemoryError */
  constructor(layers: readonly KvLayer[], capacity: KvCapacity, dtype: FloatDType, fetches: boolean) {
    const { device, slots, tokensPerSlot, tokens, batchRows = tokens, rowDType = 'f32' } = capacity;
    const most = (count: (layer: KvLayer) => number) => Math.max(...layers.map(count));
    const headDim = most((layer) => layer.headDim);
    const rows = batchRows * most((layer) => layer.queryHeads);
    const mostBlocks = fetches ? mostFetchedBlocks : mostDenseBlocks;
    this.blocksOfHead = Math.max(slots, Math.min(mostBlocks, Math.ceil(tokensPerSlot / blockTokens)));
    this.halves = fetches ? 2 : 1;
    const blocks = this.halves * this.blocksOfHead * most((layer) => layer.kvHeads);
    [this.pool, this.#outputs, this.#logSumExps] = madeTogether((own) => [
      own(new KvBlockPool({ memory: device, dtype, headDim, blockTokens, blocks })),
      own(device.tensor('u8', ['byte'], [rows * headDim * byteSize(rowDType)])),
      own(device.tensor('f32', ['part', 'element'], [2, rows])),
    ]);
  }

  get byteLength(): number {
    return this.pool.byteLength + this.#outputs.byteLength + this.#logSumExps.byteLength;
  }

  /**
   * Room for attention of a layer whose output this is.
   * @throws ShapeError, DTypeError, DeviceError, DisposedError
   * @throws InvalidValueError when the cache was made for fewer rows, or narrower ones
   */
  partsOf(operation: string, stream: Stream, output: Rows, { queryHeads, headDim }: KvLayer): AttentionParts {
    nativeOf(operation, 'output', output, stream);
    expectDType(operation, 'output', output, floats);
    expectShape(operation, 'output', output, [undefined, queryHeads, headDim]);
    const { dtype, axes, shape } = output;
    const [rows] = shape;
    const elements = rows * queryHeads;
    const fits = elements <= this.#logSumExps.shape[1] && output.byteLength <= this.#outputs.byteLength;
    expectThat(operation, 'rows of output', rows, fits, "at most the batchRows of the cache's capacity, of its rowDType");
    const logSumExp = (part: number): LogSumExp =>
      this.#logSumExps
        .slice('part', part, part + 1)
        .slice('element', 0, elements)
        .view(['token', 'queryHead'], [rows, queryHeads]);
    const second = this.#outputs.derive(dtype, axes, shape, [queryHeads * headDim, headDim, 1], 0);
    return { logSumExp: logSumExp(0), second: { output: second, logSumExp: logSumExp(1) } };
  }

  [Symbol.dispose](): void {
    this.pool.dispose();
    this.#outputs.dispose();
    this.#logSumExps.dispose();
  }
}
