import { DisposedError, InvalidValueError } from '@kv/sparse-core';
import type { KvSelector } from '@kv/sparse-core';
import { expectThat, listOf } from '@kv/sparse-core/native';

import { expectWholeNumber } from '../expect-whole-number.js';
import { TokenIds, unknownId } from './token-ids.js';

/** Ids are i32. */
const mostId = 2 ** 31 - 1;

export interface SequenceParts {
  readonly slot: number;
  /** Chooses what the cache keeps when a prompt ends; undefined keeps everything. */
  readonly select: KvSelector | undefined;
  /** The tokens that the slot holds already. */
  readonly ids: Int32Array;
  /** How many of them the prompts end behind. */
  readonly promptEnd: number;
  /** Returns the slot and its memory. */
  readonly release: (sequence: Sequence) => void;
}

/** One text that a runner works on: a slot of its cache and the tokens that are in it. */
export class Sequence implements Disposable {
  readonly slot: number;
  readonly select: KvSelector | undefined;
  readonly #release: (sequence: Sequence) => void;
  readonly #ids: TokenIds;
  #budgetTokens: number | undefined;
  #promptEnd: number;
  #failure: Error | undefined;
  /** The batch whose layers the sequence is going through. */
  #batch: object | undefined;
  #disposed = false;

  constructor({ slot, select, ids, promptEnd, release }: SequenceParts) {
    this.slot = slot;
    this.select = select;
    this.#ids = new TokenIds(ids);
    this.#promptEnd = promptEnd;
    this.#release = release;
  }

  /** Tokens that the model has seen, which is the position of the next one. */
  get length(): number {
    return this.#ids.length;
  }

  /**
   * A copy of these tokens, prompts and answers, i32 `[length]`. A token that was fed while the device alone knew it
   * is -1 until `setIds` says which one it is; `generate` and `generateTokens` do that themselves.
   */
  get ids(): Int32Array {
    return this.#ids.copy();
  }

  /** Where the newest answer begins: tokens before it are there to stay. */
  get promptEnd(): number {
    return this.#promptEnd;
  }

  /** Tokens of each kv head that its answers read at most. Undefined: as many as the store's own budget. */
  get budgetTokens(): number | undefined {
    return this.#budgetTokens;
  }

  /** What ended the sequence, if it was an error. */
  get failure(): Error | undefined {
    return this.#failure;
  }

  get disposed(): boolean {
    return this.#disposed;
  }

  /**
   * Whether a batch may run layers on this sequence.
   * @param position where the batch's first token of this sequence stands
   * @throws InvalidValueError when another batch is on its way, or has passed since this one was made
   */
  assertTurn(batch: object, position: number): void {
    this.assertUsable();
    const other = this.#batch !== undefined && this.#batch !== batch;
    if (other || position !== this.length) {
      throw new InvalidValueError(
        `The batch begins at position ${position} of a sequence of ${this.length} tokens` +
          `${other ? ', and another batch is between its layers' : ''}. Run one batch of a sequence to its ` +
          'last layer before the next is made; dispose a sequence whose batch was given up.',
        { subject: 'batch', given: position, wanted: this.length },
      );
    }
  }

  /** @throws InvalidValueError when a batch is between its layers */
  assertWhole(): void {
    this.assertUsable();
    if (this.#batch === undefined) return;
    throw new InvalidValueError(
      'The sequence has a batch between its layers, some of which hold more tokens than others. Run it to its last.',
      { subject: 'sequence', given: 'between layers', wanted: 'after the last layer' },
    );
  }

  /** From here on the sequence is that batch's, until `leave`. */
  enter(batch: object): void {
    this.#batch = batch;
  }

  /**
   * Adds the tokens of the batch whose last layer is enqueued.
   * @param ids undefined where the device alone knows them
   */
  leave(tokens: number, ids: ArrayLike<number> | undefined, isPrompt: boolean): void {
    const position = this.length;
    this.#ids.grow(tokens);
    if (ids !== undefined) this.#ids.set(position, ids);
    if (isPrompt) this.#promptEnd = this.length;
    this.#batch = undefined;
    if (this.#failure) this.dispose();
  }

  /**
   * Says which tokens those are that the device chose.
   * @param position of the first
   * @throws InvalidValueError when the sequence does not hold so many
   */
  setIds(position: number, ids: ArrayLike<number>): void {
    expectWholeNumber('position', position, 0, this.length);
    const given = listOf('setIds', 'ids', ids, this.length - position);
    const wrong = given.findIndex((id) => !Number.isInteger(id) || id < unknownId || id > mostId);
    expectThat('setIds', 'ids', given[wrong], wrong === -1, 'whole numbers, -1 for a token that nobody knows');
    this.#ids.set(position, given);
  }

  /** `Runner.setBudget` tells the store. */
  limit(budgetTokens: number | undefined): void {
    this.#budgetTokens = budgetTokens;
  }

  /** Forgets the tokens from `length` on. `Runner.truncate` takes them out of the cache. */
  truncate(length: number): void {
    this.#ids.truncate(length);
  }

  /** @throws DisposedError whose cause is what ended the sequence */
  assertUsable(): void {
    if (!this.#disposed) return;
    const cause = this.#failure;
    const why = cause ? `was ended by an error (${cause.message})` : 'was disposed';
    throw new DisposedError(`The sequence ${why}; open another with runner.openSequence().`, {
      subject: 'sequence',
      cause,
    });
  }

  /** Ends the sequence by an error, behind the last layer of a batch that it is in. */
  fail(failure: unknown): void {
    if (this.#disposed || this.#failure) return;
    this.#failure = failure instanceof Error ? failure : new Error(String(failure));
    if (this.#batch === undefined) this.dispose();
  }

  /** Returns the cache's memory once the work that is already enqueued is done. */
  dispose(): void {
    if (this.#disposed) return;
    this.#disposed = true;
    this.#release(this);
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}
