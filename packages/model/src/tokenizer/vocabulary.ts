import { InvalidValueError } from '@kv/sparse-core';

/** What the tokens of a vocabulary add to a text, as bytes: one after the other they spell it. */
export interface SpelledVocabulary {
  /** The bytes of all tokens, in the order of their ids. */
  readonly bytes: Uint8Array;
  /** `[id]`: where a token's bytes end; they begin where those of the id before end. */
  readonly ends: Uint32Array;
  /** `[id]`: 0 for an id that is no token, 1 for a token, 2 for a special one. */
  readonly kinds: Uint8Array;
  /** How many spaces a text loses at its start. */
  readonly leadingSpaces: number;
}

const specialKind = 2;
const nothing = new Uint8Array();

/** Spells token ids: what a tokenizer's decoder does, read from a table that was made off this thread. */
export class Vocabulary {
  readonly leadingSpaces: number;
  readonly #spelled: SpelledVocabulary;

  constructor(spelled: SpelledVocabulary) {
    this.#spelled = spelled;
    this.leadingSpaces = spelled.leadingSpaces;
  }

  /**
   * The bytes of a token, UTF-8 or part of a character; none for a special one where these are skipped.
   * @throws InvalidValueError when no token has this id
   */
  spell(id: number, skipSpecialTokens: boolean): Uint8Array {
    const { bytes, ends, kinds } = this.#spelled;
    const kind = Number.isInteger(id) ? (kinds[id] ?? 0) : 0;
    if (kind === 0) {
      const given = typeof id === 'number' ? id : typeof id;
      throw new InvalidValueError(`token id ${given} is not in the vocabulary; decode ids of this tokenizer.`, {
        subject: 'token id',
        given,
        wanted: 'an id of the vocabulary',
      });
    }
    if (kind === specialKind && skipSpecialTokens) return nothing;
    return bytes.subarray(ends[id - 1] ?? 0, ends[id]);
  }

  /** The text that token ids spell, bytes that are no UTF-8 as U+FFFD. @throws InvalidValueError as `spell` */
  decode(ids: ArrayLike<number>, skipSpecialTokens: boolean): string {
    const { length } = ids;
    const parts: Uint8Array[] = [];
    for (let index = 0; index < length; index += 1) parts.push(this.spell(ids[index] ?? -1, skipSpecialTokens));
    const text = new TextDecoder('utf-8', { ignoreBOM: true }).decode(Buffer.concat(parts));
    return withoutLeadingSpaces(text, this.leadingSpaces);
  }
}

/** A text without its first spaces, at most so many. */
export function withoutLeadingSpaces(text: string, most: number): string {
  let start = 0;
  while (start < most && text[start] === ' ') start += 1;
  return text.slice(start);
}
