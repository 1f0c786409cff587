import type { GeneratedId } from '@kv/model';

/** The tokens of one request, as they come. Nobody has to take them: they wait. */
export class Answer implements AsyncIterableIterator<GeneratedId> {
  readonly #tokens: GeneratedId[] = [];
  readonly #waiting: ((result: IteratorResult<GeneratedId> | Promise<IteratorResult<GeneratedId>>) => void)[] = [];
  readonly #onReturn: () => void;
  /** Whoever aborts may give any reason, also none that is true. */
  #failure: { readonly reason: Error } | undefined;
  #ended = false;
  #last = performance.now();
  /** Tokens so far. */
  count = 0;

  /** @param onReturn called when whoever takes the tokens wants no more */
  constructor(onReturn: () => void) {
    this.#onReturn = onReturn;
  }

  /** A step may have been on its way when nobody wanted more. */
  push(id: number, finishReason: GeneratedId['finishReason']): void {
    if (this.#ended) return;
    const now = performance.now();
    const token = { id, milliseconds: now - this.#last, finishReason };
    this.#last = now;
    this.count += 1;
    this.#ended = finishReason !== null;
    const taker = this.#waiting.shift();
    if (taker) taker({ value: token, done: false });
    else this.#tokens.push(token);
    if (this.#ended) this.#settle();
  }

  /** Ends it: tokens that are there are still given. */
  fail(reason: Error): void {
    if (this.#ended) return;
    this.#failure = { reason };
    this.#ended = true;
    this.#settle();
  }

  next(): Promise<IteratorResult<GeneratedId>> {
    const token = this.#tokens.shift();
    if (token) return Promise.resolve({ value: token, done: false });
    if (this.#ended) return this.#end();
    return new Promise((resolve) => {
      this.#waiting.push(resolve);
    });
  }

  return(): Promise<IteratorResult<GeneratedId>> {
    this.#tokens.length = 0;
    this.#failure = undefined;
    this.#ended = true;
    this.#settle();
    this.#onReturn();
    return this.#end();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  #settle(): void {
    if (!this.#ended) return;
    for (const taker of this.#waiting.splice(0)) taker(this.#end());
  }

  /** The failure is told once. */
  #end(): Promise<IteratorResult<GeneratedId>> {
    const failure = this.#failure;
    this.#failure = undefined;
    return failure ? Promise.reject(failure.reason) : Promise.resolve({ value: undefined, done: true });
  }
}
