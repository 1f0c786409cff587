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

type Lists = Readonly<Record<'valueRows' | 'counts', Flat<'i32'>> & Record<'weights', Flat<'f32'>>>;

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
  /** Where lists with weights wait for their way to the host, if it is beside what else the device does. */
  readonly #sent: Lists | undefined;
  /** With them. */
  readonly #exact: Readonly<Record<'query' | 'logSumExp', Flat<'f32'>>> | undefined;

  static hostBytes(sizes: ChoiceSizes): number {
    const { lists, weights, exact } = elementsOf(sizes);
    const elements: number[] = Object.values({ ...lists, ...weights, ...exact });
    return elements.reduce((sum, count) => sum + bytesOfPool(4 * count), 0);
  }

  /**
   * @param overlaps whether lists go to the host beside what else the device does
   * @throws OutOfMemoryError
   */
  constructor(sizes: ChoiceSizes, memory: HostMemory, overlaps: boolean) {
    const { device, slots } = sizes.capacity;
    const { keys, chosen, heads, lists, weights, exact } = elementsOf(sizes);
    this.rows = slots;
    this.#keys = keys;
    this.#chosen = chosen;
    [this.#onDevice, this.#onHost, this.#weights, this.#exact, this.#sent] = madeTogether((own) => {
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
        overlaps && weights.weights !== undefined
          ? {
              valueRows: flat(device, 'i32', lists.valueRows),
              counts: flat(device, 'i32', lists.counts),
              weights: flat(device, 'f32', weights.weights),
            }
          : undefined,
      ];
    });
  }

  get deviceBytes(): number {
    return bytesOf(this.#deviceTensors);
  }

  get hostBytes(): number {
    return bytesOf(this.#hostTensors);
  }

  get #deviceTensors(): Flat<DType>[] {
    return [...Object.values(this.#onDevice), ...Object.values(this.#sent ?? {})];
  }

  get #hostTensors(): Flat<DType>[] {
    const weights = this.#weights === undefined ? [] : [this.#weights];
    return [...Object.values(this.#onHost), ...weights, ...Object.values(this.#exact ?? {})];
  }

  /**
   * Room for rows of a group of a layer's kv heads: with `weights`, or with `exact` where keys are on the host. Lists
   * are on the host, or have `room` there.
   */
  of({ query: { shape, axes, dtype }, blockTable, firstKvHead }: RowsOverBlocks) {
    const [keys, chosen, exact] = [this.#keys, this.#chosen, this.#exact];
    const { scores, ranges, logSumExps } = this.#onDevice;
    const { output, ...onHost } = this.#onHost;
    const [rows, queryHeads, headDim] = shape;
    const kvHeads = blockTable.shape[1];
    const part = <D extends DType>(flat: Flat<D>, elements: number) => flat.slice('element', (firstKvHead * elements) / kvHeads, ((firstKvHead + kvHeads) * elements) / kvHeads);
    const rowsOf = (flat: Flat<'i32'>) => part(flat, rows * kvHeads * chosen).view(['token', 'kvHead', 'chosen'], [rows, kvHeads, chosen]);
    const countsOf = (flat: Flat<'i32'>) => part(flat, rows * kvHeads).view(['token', 'kvHead'], [rows, kvHeads]);
    const weightsOf = (flat: Flat<'f32'>) => {
      const axes = ['token', 'kvHead', 'chosen', 'groupHead'] as const;
      return part(flat, rows * queryHeads * chosen).view(axes, [rows, kvHeads, chosen, queryHeads / kvHeads]);
    };
    const weights = this.#weights && weightsOf(this.#weights);
    const host = { valueRows: rowsOf(onHost.valueRows), counts: countsOf(onHost.counts), weights };
    const sent = this.#sent && {
      valueRows: rowsOf(this.#sent.valueRows),
      counts: countsOf(this.#sent.counts),
      weights: weightsOf(this.#sent.weights),
    };
    const ofHeads = (flat: Flat<'f32'>) => part(flat, rows * queryHeads).view(['token', 'queryHead'], [rows, queryHeads]);
    return {
      scores: part(scores, rows * queryHeads * keys).view(['token', 'queryHead', 'key'], [rows, queryHeads, keys]),
      ranges: part(ranges, rows * queryHeads * rangeParts * 2).view(['token', 'queryHead', 'part', 'bound'], [rows, queryHeads, rangeParts, 2]),
      logSumExp: ofHeads(logSumExps),
      ...(sent ?? host),
      room: sent && weights && { hostValueRows: host.valueRows, hostCounts: host.counts, hostWeights: weights },
      output: part(output, rows * queryHeads * headDim).view(axes, shape),
      exact: exact && {
        query: exact.query.derive(dtype, axes, shape, [queryHeads * headDim, headDim, 1], (4 * firstKvHead * rows * queryHeads * headDim) / kvHeads),
        logSumExp: ofHeads(exact.logSumExp),
      },
    };
  }

  [Symbol.dispose](): void {
    for (const tensor of [...this.#deviceTensors, ...this.#hostTensors]) tensor.dispose();
  }
}

function bytesOf(tensors: readonly Flat<DType>[]): number {
  return tensors.reduce((sum, { byteLength }) => sum + byteLength, 0);
}
