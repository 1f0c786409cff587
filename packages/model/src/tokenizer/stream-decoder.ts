/** More tokens than a cut character and the spaces around it can span. */
const contextTokens = 8;

/**
 * Turns token ids into text one at a time. What it has given, taken together, is what decoding all ids at
 * once gives; a character whose bytes are spread over several tokens comes with the last of them.
 */
export class StreamDecoder {
  readonly #decode: (ids: readonly number[]) => string;
  #window: readonly number[];
  /** How much of the window's text has been given. */
  #given: number;

  constructor(decode: (ids: readonly number[]) => string, preceding: ArrayLike<number> = []) {
    this.#decode = decode;
    this.#window = Array.from(preceding).slice(-contextTokens);
    this.#given = decode(this.#window).length;
  }

  /** Takes one more token and returns the text that it completes, possibly none. */
  push(id: number): string {
    const window = [...this.#window, id];
    const text = this.#decode(window);
    // A character cut short decodes to one U+FFFD at the end; the next token may complete it.
    const held = text.endsWith('\uFFFD') ? 1 : 0;
    const completed = text.slice(this.#given, text.length - held);
    this.#window = window.slice(-contextTokens);
    this.#given = this.#decode(this.#window).length - held;
    return completed;
  }

  /** The text still held back, with U+FFFD for bytes that never became a character. */
  end(): string {
    const text = this.#decode(this.#window);
    const rest = text.slice(this.#given);
    this.#given = text.length;
    return rest;
  }
}
