import { type DType, type KvCapacity, type KvLayer, type Tensor } from '@kv/sparse-core';
import { madeTogether } from '@kv/sparse-core/native';
import type { MissingMass } from '../operations/select-by-mass.js';
import { blockTokens } from '../quantized-blocks.js';
import { bytesOfPool, type HostMemory } from './host-memory.js';

export interface ChoiceSizes {
  readonly layers: readonly KvLayer[];
  readonly capacity: KvCapacity;
  /** The most tokens of a kv head that a row chooses. */
  readonly maxTokens: number;
  /** With 'meanValue' it reads the mean value beside them. */
  readonly missingMass: MissingMass;
}

type Flat<D extends DType> = Tensor<D, readonly ['element']>;

/** Elements, of 4 bytes each, for one row of each slot in the largest layer. */
function elementsOf({ layers, capacity, maxTokens, missingMass }: ChoiceSizes) {
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
    [this.#scores, this.#valueRows, this.#weights, this.#counts, this.#output] = madeTogether((own) => [
      own(device.tensor('f32', ['element'], [scores])),
      own(memory.tensor('i32', ['element'], [host.valueRows])),
      own(memory.tensor('f32', ['element'], [host.weights])),
      own(memory.tensor('i32', ['element'], [host.counts])),
      own(memory.tensor('f32', ['element'], [host.output])),
    ]);
  }

  get deviceBytes(): number {
    return this.#scores.byteLength;
  }

  get hostBytes(): number {
    const onHost = [this.#valueRows, this.#weights, this.#counts, this.#output];
    return onHost.reduce((sum, { byteLength }) => sum + byteLength, 0);
  }

  /** Room of rows of a layer. */
  of({ kvHeads, queryHeads, headDim }: KvLayer, rows: number) {
    const [keys, chosen] = [this.#keys, this.#chosen];
    const first = <D extends DType>(flat: Flat<D>, elements: number) => flat.slice('element', 0, elements);
    return {
      scores: first(this.#scores, rows * queryHeads * keys).view(['token', 'queryHead', 'key'], [rows, queryHeads, keys]),
      valueRows: first(this.#valueRows, rows * kvHeads * chosen).view(['token', 'kvHead', 'chosen'], [rows, kvHeads, chosen]),
      weights: first(this.#weights, rows * queryHeads * chosen).view(
        ['token', 'kvHead', 'chosen', 'groupHead'],
        [rows, kvHeads, chosen, queryHeads / kvHeads],
      ),
      counts: first(this.#counts, rows * kvHeads).view(['token', 'kvHead'], [rows, kvHeads]),
      output: first(this.#output, rows * queryHeads * headDim).view(['token', 'queryHead', 'dim'], [rows, queryHeads, headDim]),
    };
  }

  [Symbol.dispose](): void {
    for (const tensor of [this.#scores, this.#valueRows, this.#weights, this.#counts, this.#output]) tensor.dispose();
  }
}
