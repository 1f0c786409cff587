import { withoutLeadingSpaces } from './vocabulary.js';
import type { Vocabulary } from './vocabulary.js';

/** More tokens than a cut character can span. */
const contextTokens = 8;

/**
 * Turns token ids into text one at a time. What it has given, taken together, is what decoding all ids at
 * once gives; a character whose bytes are spread over several tokens comes with the last of them.
 */
export class StreamDecoder {
  readonly #vocabulary: Vocabulary;
  readonly #skipSpecialTokens: boolean;
  readonly #bytes = new TextDecoder('utf-8', { ignoreBOM: true });
  /** Spaces that the text still loses at its start. */
  #leadingSpaces: number;

  constructor(vocabulary: Vocabulary, skipSpecialTokens: boolean, preceding: ArrayLike<number> = []) {
    this.#vocabulary = vocabulary;
    this.#skipSpecialTokens = skipSpecialTokens;
    this.#leadingSpaces = vocabulary.leadingSpaces;
    const { length } = preceding;
    for (let index = Math.max(0, length - contextTokens); index < length; index += 1) this.push(preceding[index] ?? -1);
  }

  /** Takes one more token and returns the text that it completes, possibly none. */
  push(id: number): string {
    const bytes = this.#vocabulary.spell(id, this.#skipSpecialTokens);
    return this.#withoutLeadingSpaces(this.#bytes.decode(bytes, { stream: true }));
  }

  /** The text still held back, with U+FFFD for bytes that never became a character. */
  end(): string {
    return this.#withoutLeadingSpaces(this.#bytes.decode());
  }

  #withoutLeadingSpaces(text: string): string {
    const given = withoutLeadingSpaces(text, this.#leadingSpaces);
    this.#leadingSpaces = given === '' ? this.#leadingSpaces - text.length : 0;
    return given;
  }
}
