import type { Stream } from '@kv/sparse-core';

import type { ModelBatch } from './model-batch.js';
import type { Sequence } from './sequence.js';

type Owner = Sequence | ModelBatch;

interface Work {
  readonly stream: Stream;
  /** Whether all of it is known to be done. */
  readonly isDone: () => boolean;
}

/**
 * The newest work of sequences and batches, and whether it is known to be done. When an operation fails, what its stream
 * has behind it is skipped: only what is known to be done can be relied on.
 */
export class WorkLog {
  readonly #newest = new WeakMap<Owner, Work>();
  readonly #failures = new WeakMap<Stream, Error>();

  /** While `enqueue` goes on, more is to come: nothing is known to be done. */
  async during<Result>(stream: Stream, owners: readonly Owner[], enqueue: () => Result | Promise<Result>): Promise<Result> {
    for (const owner of owners) this.#newest.set(owner, { stream, isDone: () => false });
    try {
      return await enqueue();
    } finally {
      this.enqueued(stream, owners);
    }
  }

  enqueued(stream: Stream, owners: Iterable<Owner>): void {
    const work = { stream, isDone: stream.progress() };
    for (const owner of owners) this.#newest.set(owner, work);
  }

  failed(stream: Stream, failure: Error): void {
    this.#failures.set(stream, failure);
  }

  /** The failure behind which the owner's work may have been skipped, if there is one. */
  lostBy(owner: Owner): Error | undefined {
    const work = this.#newest.get(owner);
    return work === undefined || work.isDone() ? undefined : this.#failures.get(work.stream);
  }
}
