import { InvalidValueError, QueueFullError } from '@kv/sparse-core';
import type { KvSelector } from '@kv/sparse-core';

import { Sequence } from './sequence.js';

/** The sequences of a runner, and the slots of its cache that they have. */
export class OpenSequences implements Iterable<Sequence> {
  readonly #slots: number;
  readonly #emptySlot: (slot: number) => void;
  /** Slots from here on were never used. */
  #firstUnused = 0;
  /** Others that nobody has. */
  readonly #freeSlots: number[] = [];
  readonly #open = new Set<Sequence>();
  /** Those that were disposed. */
  readonly #ended = new WeakSet<Sequence>();

  /** @param emptySlot called for a slot whose sequence is disposed */
  constructor(slots: number, emptySlot: (slot: number) => void) {
    this.#slots = slots;
    this.#emptySlot = emptySlot;
  }

  /**
   * @param ids the tokens that the slot will hold
   * @param promptEnd how many of them the prompts end behind
   * @throws QueueFullError when all slots are in use
   */
  open(select: KvSelector | undefined, ids: Int32Array, promptEnd: number): Sequence {
    const slot = this.#freeSlots.pop() ?? this.#firstUnused;
    if (slot >= this.#slots) {
      throw new QueueFullError(
        `All ${this.#open.size} sequences are in use. Dispose one, or make the runner with a larger 'sequences'.`,
        { subject: 'sequences', given: this.#open.size + 1, wanted: this.#open.size },
      );
    }
    this.#firstUnused = Math.max(this.#firstUnused, slot + 1);
    const release = (sequence: Sequence): void => {
      this.#release(sequence);
    };
    const sequence = new Sequence({ slot, select, ids, promptEnd, release });
    this.#open.add(sequence);
    return sequence;
  }

  /** @throws InvalidValueError, DisposedError */
  expectOwn(sequence: Sequence): void {
    if (this.#open.has(sequence)) return;
    if (this.#ended.has(sequence)) sequence.assertUsable();
    throw new InvalidValueError(
      "The sequence is not this runner's. Each runner has a cache of its own: open the sequence with its openSequence().",
      { subject: 'sequence' },
    );
  }

  /** Empties the slots that nobody has once more: that they are empty may be among what a failed stream skipped. */
  emptyFreeSlots(): void {
    for (const slot of this.#freeSlots) this.#emptySlot(slot);
  }

  [Symbol.iterator](): Iterator<Sequence> {
    return this.#open.values();
  }

  #release(sequence: Sequence): void {
    this.#open.delete(sequence);
    this.#ended.add(sequence);
    this.#emptySlot(sequence.slot);
    this.#freeSlots.push(sequence.slot);
  }
}
