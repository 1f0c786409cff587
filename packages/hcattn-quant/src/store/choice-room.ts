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

/** Where rows of answers choose tokens by their scores, and sum the values of these: all layers' in turn. */
export class ChoiceRoom implements Disposable {
  /** Rows that there is room for: one of each slot. */
  readonly rows: number;
  readonly #keys: number;
  readonly #chosen: number;
  /** On the device; the others are on the host. */
  readonly #scores: Flat<'f32'>;
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
    const { keys, chosen, scores, host } = elementsOf(sizes);
    this.rows = slots;
    this.#keys = keys;
    this.#chosen = chosen;
    const { query, logSumExp } = host;
    [this.#scores, this.#valueRows, this.#weights, this.#counts, this.#output, this.#exact] = madeTogether((own) => [
      own(device.tensor('f32', ['element'], [scores])),
      own(memory.tensor('i32', ['element'], [host.valueRows])),
      own(memory.tensor('f32', ['element'], [host.weights])),
      own(memory.tensor('i32', ['element'], [host.counts])),
      own(memory.tensor('f32', ['element'], [host.output])),
      query === undefined || logSumExp === undefined
        ? undefined
        : { query: own(memory.tensor('f32', ['element'], [query])), logSumExp: own(memory.tensor('f32', ['element'], [logSumExp])) },
    ]);
  }

  get deviceBytes(): number {
    return this.#scores.byteLength;
  }

  get hostBytes(): number {
    return this.#onHost.reduce((sum, { byteLength }) => sum + byteLength, 0);
  }

  get #onHost(): Flat<DType>[] {
    return [this.#valueRows, this.#weights, this.#counts, this.#output, ...Object.values(this.#exact ?? {})];
  }

  /** Room for rows of a layer with these queries; `exact` is there with keys on the host. */
  of({ kvHeads, queryHeads, headDim }: KvLayer, { shape, axes, dtype }: RowsOverBlocks['query']) {
    const [keys, chosen, exact] = [this.#keys, this.#chosen, this.#exact];
    const [rows] = shape;
    const first = <D extends DType>(flat: Flat<D>, elements: number) => flat.slice('element', 0, elements);
    return {
      scores: first(this.#scores, rows * queryHeads * keys).view(['token', 'queryHead', 'key'], [rows, queryHeads, keys]),
      valueRows: first(this.#valueRows, rows * kvHeads * chosen).view(['token', 'kvHead', 'chosen'], [rows, kvHeads, chosen]),
      weights: first(this.#weights, rows * queryHeads * chosen).view(
        ['token', 'kvHead', 'chosen', 'groupHead'],
        [rows, kvHeads, chosen, queryHeads / kvHeads],
      ),
      counts: first(this.#counts, rows * kvHeads).view(['token', 'kvHead'], [rows, kvHeads]),
      output: first(this.#output, rows * queryHeads * headDim).view(axes, shape),
      exact: exact && {
        query: exact.query.derive(dtype, axes, shape, [queryHeads * headDim, headDim, 1], 0),
        logSumExp: first(exact.logSumExp, rows * queryHeads).view(['token', 'queryHead'], [rows, queryHeads]),
      },
    };
  }

  [Symbol.dispose](): void {
    for (const tensor of [this.#scores, ...this.#onHost]) tensor.dispose();
  }
}
