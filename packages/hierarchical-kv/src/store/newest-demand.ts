import type { KvDemand, KvLayer, KvCapacity, Stream, Tensor } from '@kv/sparse-core';
import type { BlockCache } from '../operations/plan-blocks.js';

/** Steps, working set, hits, misses. */
const counts = 4;

/** Counts that the device keeps of what slots read in each layer. They are read again for whoever asked, behind the next step. */
export class NewestDemand implements Disposable {
  readonly #counts: Tensor<'i32', readonly ['layer', 'slot', 'kvHead', 'count']>;
  /** Numbers of a slot in a layer. */
  readonly #ofSlot: number;
  readonly #slots: number;
  #arrived: Int32Array | undefined;
  #isWanted = false;
  #isUnderWay = false;
  /** Slots of layers that were emptied since the counts on their way were read: where their counts begin. */
  readonly #emptied = new Set<number>();

  /** Of one layer. */
  static bytes({ kvHeads }: KvLayer, { slots }: KvCapacity): number {
    return 4 * counts * slots * kvHeads;
  }

  /** @throws OutOfMemoryError */
  constructor({ kvHeads }: KvLayer, { device, slots }: KvCapacity, layers: number) {
    this.#ofSlot = kvHeads * counts;
    this.#slots = slots;
    const zeros = new Int32Array(layers * slots * kvHeads * counts);
    this.#counts = device.tensor('i32', ['layer', 'slot', 'kvHead', 'count'], [layers, slots, kvHeads, counts], zeros);
  }

  /** Those of a layer, by its place among them. */
  ofLayer(layer: number): BlockCache['demand'] {
    const [, slots, kvHeads] = this.#counts.shape;
    return this.#counts.slice('layer', layer, layer + 1).view(['slot', 'kvHead', 'count'], [slots, kvHeads, counts]);
  }

  /** What has arrived of a slot, summed over its kv heads. */
  of(layer: number, slot: number): KvDemand | undefined {
    this.#isWanted = true;
    const first = this.#firstOf(layer, slot);
    const step = this.#arrived?.[first] ?? 0;
    if (this.#arrived === undefined || step === 0) return undefined;
    let [workingSet, hits, misses] = [0, 0, 0];
    // Each layer is asked of every answer: a loop without views of the counts.
    for (let head = first; head < first + this.#ofSlot; head += counts) {
      workingSet += this.#arrived[head + 1] ?? 0;
      hits += this.#arrived[head + 2] ?? 0;
      misses += this.#arrived[head + 3] ?? 0;
    }
    return { step, workingSet, hits, misses };
  }

  /** Has them read, if somebody asked since they were. */
  ask(stream: Stream): void {
    if (!this.#isWanted || this.#isUnderWay || stream.recording) return;
    this.#isWanted = false;
    this.#isUnderWay = true;
    this.#emptied.clear();
    void this.#counts
      .read(stream)
      .then((arrived) => {
        for (const first of this.#emptied) arrived.fill(0, first, first + this.#ofSlot);
        this.#arrived = arrived;
      })
      // What failed the stream is told to those who wait for it.
      .catch(() => undefined)
      .finally(() => (this.#isUnderWay = false));
  }

  reset(layer: number, slot: number): void {
    const first = this.#firstOf(layer, slot);
    this.#emptied.add(first);
    this.#arrived?.fill(0, first, first + this.#ofSlot);
  }

  [Symbol.dispose](): void {
    this.#counts.dispose();
  }

  #firstOf(layer: number, slot: number): number {
    return (layer * this.#slots + slot) * this.#ofSlot;
  }
}
