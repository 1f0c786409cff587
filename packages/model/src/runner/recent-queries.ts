import type { Device, FloatDType, Stream, TensorHandle } from '@kv/sparse-core';
import { madeTogether } from '@kv/sparse-core/native';

type Queries = TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;

/**
 * The last queries of one prompt in one layer, in order, whatever the chunks were: what a selector looks at.
 */
export class RecentQueries {
  readonly #window: number;
  #current: Queries;
  #spare: Queries;
  #count = 0;
  #end = 0;

  constructor(device: Device, dtype: FloatDType, window: number, queryHeads: number, headDim: number) {
    const allocate = (): Queries =>
      device.tensor(dtype, ['token', 'queryHead', 'dim'], [window, queryHeads, headDim]);
    this.#window = window;
    [this.#current, this.#spare] = madeTogether((own) => [own(allocate()), own(allocate())]);
  }

  /**
   * Takes a chunk's queries, `[token, queryHead, dim]`. Those of a prompt that went on behind an answer are no
   * neighbours of the ones before it: they begin anew.
   * @param position of the first
   */
  push(stream: Stream, queries: Queries, position: number): void {
    if (position !== this.#end) this.#count = 0;
    const given = queries.shape[0];
    const fresh = Math.min(given, this.#window);
    const kept = Math.min(this.#count, this.#window - fresh);
    if (kept > 0) {
      const older = this.#current.slice('token', this.#count - kept, this.#count);
      stream.copy(older, this.#spare.slice('token', 0, kept));
    }
    stream.copy(queries.slice('token', given - fresh, given), this.#spare.slice('token', kept, kept + fresh));
    [this.#current, this.#spare] = [this.#spare, this.#current];
    this.#count = kept + fresh;
    this.#end = position + given;
  }

  /** `[token, queryHead, dim]`, as many as there were, at most the window. */
  get queries(): Queries {
    return this.#current.slice('token', 0, this.#count);
  }

  /** The position behind the newest of them. */
  get end(): number {
    return this.#end;
  }

  /** The position of the first of them. */
  get position(): number {
    return this.#end - this.#count;
  }

  dispose(): void {
    this.#current.dispose();
    this.#spare.dispose();
  }
}
