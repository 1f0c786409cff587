import { expectThat, listOf } from '@kv/sparse-core/native';

/** More of them would take longer to look for than a token takes. */
const mostStops = 1024;

/** Passes streamed text on until one of the stop strings appears in it. */
export class StopMatcher {
  readonly #stops: readonly string[];
  /** Text not passed on yet: it may be the beginning of a stop string. */
  #held = '';
  #stopped = false;

  /**
   * @param stops non-empty strings, at most 1,024
   * @throws InvalidValueError for what is none
   */
  constructor(stops: readonly string[]) {
    this.#stops = listOf('StopMatcher', 'stops', stops, mostStops);
    for (const stop of this.#stops) {
      expectThat('StopMatcher', 'stops', stop, typeof stop === 'string' && stop !== '', 'non-empty strings');
    }
  }

  /** Whether a stop string has appeared. */
  get stopped(): boolean {
    return this.#stopped;
  }

  /**
   * Takes more text and returns what can be passed on: never any part of the stop string or what follows it.
   */
  push(text: string): string {
    expectThat('StopMatcher', 'text', text, typeof text === 'string', 'a text');
    if (this.#stopped) return '';
    const pending = this.#held + text;
    const found = this.#stops.map((stop) => pending.indexOf(stop)).filter((index) => index >= 0);
    if (found.length > 0) {
      this.#stopped = true;
      this.#held = '';
      return pending.slice(0, Math.min(...found));
    }
    const held = Math.max(0, ...this.#stops.map((stop) => overlap(pending, stop)));
    this.#held = pending.slice(pending.length - held);
    return pending.slice(0, pending.length - held);
  }

  /** The text held back, when no more will come. */
  end(): string {
    const rest = this.#held;
    this.#held = '';
    return rest;
  }
}

/** The length of the longest end of `text` that begins `stop`, but is not all of it. */
function overlap(text: string, stop: string): number {
  for (let length = Math.min(text.length, stop.length - 1); length > 0; length -= 1) {
    if (stop.startsWith(text.slice(text.length - length))) return length;
  }
  return 0;
}
