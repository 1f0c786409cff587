import type { Device, Stream } from '../handles.js';

/** A stream of copies between device and host, or of sums on the host, beside the stream of a cache's other work. */
export class LinkStream implements Disposable {
  #copies: Stream;
  /** The stream of the other work. */
  #work: Stream | undefined;
  #ahead = false;

  /** @throws OutOfMemoryError */
  constructor(device: Device) {
    this.#copies = device.createStream();
  }

  /** Whether something was enqueued that the other work has not been put behind. */
  get isAhead(): boolean {
    return this.#ahead;
  }

  /** The stream of copies, behind all that is enqueued on `work` so far. */
  behind(work: Stream): Stream {
    this.#serve(work);
    this.#copies.waitFor(work);
    this.#ahead = true;
    return this.#copies;
  }

  /** Puts what comes next on `work` behind all copies. */
  join(work: Stream): void {
    if (!this.#ahead) return;
    this.#serve(work);
    work.waitFor(this.#copies);
    this.#ahead = false;
  }

  [Symbol.dispose](): void {
    this.#copies.dispose();
  }

  /** What failed on one stream failed the other. Where another stream took its place, another of copies is needed. */
  #serve(work: Stream): void {
    if (this.#work !== undefined && this.#work !== work) {
      const former = this.#copies;
      this.#copies = work.device.createStream();
      this.#copies.waitFor(former, { takesFailure: false });
      former.dispose();
    }
    this.#work = work;
  }
}
