import { type DType, type KvCapacity, type KvLayer, type Tensor } from '@kv/sparse-core';
import { madeTogether } from '@kv/sparse-core/native';
import type { MissingMass } from '../operations/select-by-mass.js';
import { blockTokens } from '../quantized-blocks.js';
import type { RowsOverBlocks } from './block-codec.js';
import { bytesOfPool, type HostMemory } from './host-memory.js';

export interface ChoiceSizes {
  readonly layers: readonly KvLayer[];
  readonly capacity: KvCapacity;
  /** The most tokens of a kv head that a row chooses. */
  readonly maxTokens: number;
  /** With 'meanValue' it reads the mean value beside them. */
  readonly missingMass: MissingMass;
  /** Whether what it attends to on the host are keys too. */
  readonly hostKeys: boolean;
}

type Flat<D extends DType> = Tensor<D, readonly ['element']>;

/** Elements, of 4 bytes each, for one row of each slot in the largest layer. */
function elementsOf({ layers, capacity, maxTokens, missingMass, hostKeys }: ChoiceSizes) {
  const most = (count: (layer: KvLayer) => number) => capacity.slots * Math.max(...layers.map(count));
  const keys = Math.ceil(capacity.tokensPerSlot / blockTokens) * blockTokens;
  const chosen = Math.min(maxTokens, keys) + (missingMass === 'meanValue' ? 1 : 0);
  return {
    ...{ keys, chosen },
    scores: most(({ queryHeads }) => queryHeads * keys),
    heads: most(({ queryHeads }) => queryHeads),
    host: {
      valueRows: most(({ kvHeads }) => kvHeads * chosen),
      weights: most(({ queryHeads }) => queryHeads * chosen),
      counts: most(({ kvHeads }) => kvHeads),
      output: most(({ queryHeads, headDim }) => queryHeads * headDim),
      ...(hostKeys && {
        query: most(({ queryHeads, headDim }) => queryHeads * headDim),
        logSumExp: most(({ queryHeads }) => queryHeads),
      }),
    },
  };
}

/** A group of kv heads of a layer, and its rows' room. */
export type GroupRoom = ReturnType<ChoiceRoom['of']>;

/** Where rows of answers choose tokens by their scores, and sum the values of these: all layers' in turn. */
export class ChoiceRoom implements Disposable {
  /** Rows that there is room for: one of each slot. */
  readonly rows: number;
  readonly #keys: number;
  readonly #chosen: number;
  /** These are on the device; the others are on the host. */
  readonly #scores: Flat<'f32'>;
  readonly #logSumExps: Flat<'f32'>;
  readonly #denseLogSumExps: Flat<'f32'>;
  readonly #valueRows: Flat<'i32'>;
  readonly #weights: Flat<'f32'>;
  readonly #counts: Flat<'i32'>;
  readonly #output: Flat<'f32'>;
  /** With keys on the host. */
  readonly #exact: { readonly query: Flat<'f32'>; readonly logSumExp: Flat<'f32'> } | undefined;

  static hostBytes(sizes: ChoiceSizes): number {
    return Object.values(elementsOf(sizes).host).reduce((sum, elements) => sum + bytesOfPool(4 * elements), 0);
  }

  /** @throws OutOfMemoryError */
  constructor(sizes: ChoiceSizes, memory: HostMemory) {
    const { device, slots } = sizes.capacity;
    const { keys, chosen, scores, heads, host } = elementsOf(sizes);
    this.rows = slots;
    this.#keys = keys;
    this.#chosen = chosen;
    const { query, logSumExp } = host;
    const made = madeTogether((own) => [
      own(device.tensor('f32', ['element'], [scores])),
      own(device.tensor('f32', ['element'], [heads])),
      own(device.tensor('f32', ['element'], [heads])),
      own(memory.tensor('i32', ['element'], [host.valueRows])),
      own(memory.tensor('f32', ['element'], [host.weights])),
      own(memory.tensor('i32', ['element'], [host.counts])),
      own(memory.tensor('f32', ['element'], [host.output])),
      query === undefined || logSumExp === undefined
        ? undefined
        : { query: own(memory.tensor('f32', ['element'], [query])), logSumExp: own(memory.tensor('f32', ['element'], [logSumExp])) },
    ] as const);
    [this.#scores, this.#logSumExps, this.#denseLogSumExps, this.#valueRows, this.#weights, this.#counts, this.#output, this.#exact] = made;
  }

  get deviceBytes(): number {
    return this.#onDevice.reduce((sum, { byteLength }) => sum + byteLength, 0);
  }

  get #onDevice(): Flat<'f32'>[] {
    return [this.#scores, this.#logSumExps, this.#denseLogSumExps];
  }

  get hostBytes(): number {
    return this.#onHost.reduce((sum, { byteLength }) => sum + byteLength, 0);
  }

  get #onHost(): Flat<DType>[] {
    return [this.#valueRows, this.#weights, this.#counts, this.#output, ...Object.values(this.#exact ?? {})];
  }

  /** Room for rows of the n-th group of a layer's kv heads; `exact` is there with keys on the host. */
  of({ query: { shape, axes, dtype }, blockTable }: RowsOverBlocks, nth: number) {
    const [keys, chosen, exact] = [this.#keys, this.#chosen, this.#exact];
    const [rows, queryHeads, headDim] = shape;
    const kvHeads = blockTable.shape[1];
    const part = <D extends DType>(flat: Flat<D>, elements: number) => flat.slice('element', nth * elements, (nth + 1) * elements);
    const ofHeads = (flat: Flat<'f32'>) => part(flat, rows * queryHeads).view(['token', 'queryHead'], [rows, queryHeads]);
    return {
      logSumExp: ofHeads(this.#logSumExps),
      denseLogSumExp: ofHeads(this.#denseLogSumExps),
      scores: part(this.#scores, rows * queryHeads * keys).view(['token', 'queryHead', 'key'], [rows, queryHeads, keys]),
      valueRows: part(this.#valueRows, rows * kvHeads * chosen).view(['token', 'kvHead', 'chosen'], [rows, kvHeads, chosen]),
      weights: part(this.#weights, rows * queryHeads * chosen).view(
        ['token', 'kvHead', 'chosen', 'groupHead'],
        [rows, kvHeads, chosen, queryHeads / kvHeads],
      ),
      counts: part(this.#counts, rows * kvHeads).view(['token', 'kvHead'], [rows, kvHeads]),
      output: part(this.#output, rows * queryHeads * headDim).view(axes, shape),
      exact: exact && {
        query: exact.query.derive(dtype, axes, shape, [queryHeads * headDim, headDim, 1], 4 * nth * rows * queryHeads * headDim),
        logSumExp: ofHeads(exact.logSumExp),
      },
    };
  }

  [Symbol.dispose](): void {
    for (const tensor of [...this.#onDevice, ...this.#onHost]) tensor.dispose();
  }
}
