import { type DType, type KvCapacity, type KvLayer, type Tensor } from '@kv/sparse-core';
import { bytesOfPool, type HostMemory, madeTogether } from '@kv/sparse-core/native';
import type { MissingMass } from '../operations/select-by-mass.js';
import { blockTokens } from '../quantized-blocks.js';
import type { RowsOverBlocks } from './block-codec.js';

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

/** As many as a device has thread blocks for a head, or nearly. */
const rangeParts = 256;

type Flat<D extends DType> = Tensor<D, readonly ['element']>;

/** Elements, of 4 bytes each, for one row of each slot in the largest layer. */
function elementsOf({ layers, capacity, maxTokens, missingMass, hostKeys }: ChoiceSizes) {
  const most = (count: (layer: KvLayer) => number) => capacity.slots * Math.max(...layers.map(count));
  const keys = Math.ceil(capacity.tokensPerSlot / blockTokens) * blockTokens;
  const chosen = Math.min(maxTokens, keys) + (missingMass === 'meanValue' ? 1 : 0);
  const heads = most(({ queryHeads }) => queryHeads);
  const rows = most(({ queryHeads, headDim }) => queryHeads * headDim);
  const lists = { valueRows: most(({ kvHeads }) => kvHeads * chosen), counts: most(({ kvHeads }) => kvHeads), output: rows };
  const weights = hostKeys ? {} : { weights: heads * chosen };
  const exact = hostKeys ? { query: rows, logSumExp: heads } : {};
  return { keys, chosen, heads, lists, weights, exact };
}

/** Room of a group of a layer's kv heads. */
export type GroupRoom = ReturnType<ChoiceRoom['of']>;

/** Where rows of answers choose tokens by their scores, and sum the values of these: all layers' in turn. */
export class ChoiceRoom implements Disposable {
  /** Rows that there is room for: one of each slot. */
  readonly rows: number;
  readonly #keys: number;
  readonly #chosen: number;
  readonly #onDevice: Readonly<Record<'scores' | 'ranges' | 'logSumExps', Flat<'f32'>>>;
  readonly #onHost: Readonly<Record<'valueRows' | 'counts', Flat<'i32'>> & Record<'output', Flat<'f32'>>>;
  /** Without keys on the host. */
  readonly #weights: Flat<'f32'> | undefined;
  /** With them. */
  readonly #exact: Readonly<Record<'query' | 'logSumExp', Flat<'f32'>>> | undefined;

  static hostBytes(sizes: ChoiceSizes): number {
    const { lists, weights, exact } = elementsOf(sizes);
    const elements: number[] = Object.values({ ...lists, ...weights, ...exact });
    return elements.reduce((sum, count) => sum + bytesOfPool(4 * count), 0);
  }

  /** @throws OutOfMemoryError */
  constructor(sizes: ChoiceSizes, memory: HostMemory) {
    const { device, slots } = sizes.capacity;
    const { keys, chosen, heads, lists, weights, exact } = elementsOf(sizes);
    this.rows = slots;
    this.#keys = keys;
    this.#chosen = chosen;
    [this.#onDevice, this.#onHost, this.#weights, this.#exact] = madeTogether((own) => {
      const flat = <D extends 'f32' | 'i32'>(from: HostMemory, dtype: D, count: number): Flat<D> => own(from.tensor(dtype, ['element'], [count]));
      return [
        {
          scores: flat(device, 'f32', heads * keys),
          ranges: flat(device, 'f32', heads * rangeParts * 2),
          logSumExps: flat(device, 'f32', heads),
        },
        {
          valueRows: flat(memory, 'i32', lists.valueRows),
          counts: flat(memory, 'i32', lists.counts),
          output: flat(memory, 'f32', lists.output),
        },
        weights.weights === undefined ? undefined : flat(memory, 'f32', weights.weights),
        exact.query === undefined ? undefined : { query: flat(memory, 'f32', exact.query), logSumExp: flat(memory, 'f32', exact.logSumExp) },
      ];
    });
  }

  get deviceBytes(): number {
    return bytesOf(Object.values(this.#onDevice));
  }

  get hostBytes(): number {
    return bytesOf(this.#hostTensors);
  }

  get #hostTensors(): Flat<DType>[] {
    const weights = this.#weights === undefined ? [] : [this.#weights];
    return [...Object.values(this.#onHost), ...weights, ...Object.values(this.#exact ?? {})];
  }

  /** Room for rows of the n-th group of a layer's kv heads: with `weights`, or with `exact` where keys are on the host. */
  of({ query: { shape, axes, dtype }, blockTable }: RowsOverBlocks, nth: number) {
    const [keys, chosen, weights, exact] = [this.#keys, this.#chosen, this.#weights, this.#exact];
    const { scores, ranges, logSumExps } = this.#onDevice;
    const { valueRows, counts, output } = this.#onHost;
    const [rows, queryHeads, headDim] = shape;
    const kvHeads = blockTable.shape[1];
    const part = <D extends DType>(flat: Flat<D>, elements: number) => flat.slice('element', nth * elements, (nth + 1) * elements);
    const ofHeads = (flat: Flat<'f32'>) => part(flat, rows * queryHeads).view(['token', 'queryHead'], [rows, queryHeads]);
    return {
      scores: part(scores, rows * queryHeads * keys).view(['token', 'queryHead', 'key'], [rows, queryHeads, keys]),
      ranges: part(ranges, rows * queryHeads * rangeParts * 2).view(['token', 'queryHead', 'part', 'bound'], [rows, queryHeads, rangeParts, 2]),
      logSumExp: ofHeads(logSumExps),
      valueRows: part(valueRows, rows * kvHeads * chosen).view(['token', 'kvHead', 'chosen'], [rows, kvHeads, chosen]),
      counts: part(counts, rows * kvHeads).view(['token', 'kvHead'], [rows, kvHeads]),
      output: part(output, rows * queryHeads * headDim).view(axes, shape),
      weights:
        weights &&
        part(weights, rows * queryHeads * chosen).view(
          ['token', 'kvHead', 'chosen', 'groupHead'],
          [rows, kvHeads, chosen, queryHeads / kvHeads],
        ),
      exact: exact && {
        query: exact.query.derive(dtype, axes, shape, [queryHeads * headDim, headDim, 1], 4 * nth * rows * queryHeads * headDim),
        logSumExp: ofHeads(exact.logSumExp),
      },
    };
  }

  [Symbol.dispose](): void {
    for (const tensor of [...Object.values(this.#onDevice), ...this.#hostTensors]) tensor.dispose();
  }
}

function bytesOf(tensors: readonly Flat<DType>[]): number {
  return tensors.reduce((sum, { byteLength }) => sum + byteLength, 0);
}
