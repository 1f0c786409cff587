import { readFileSync } from 'node:fs';
import { join } from 'node:path';

import * as library from '@huggingface/tokenizers';
import { InvalidValueError } from '@kv/sparse-core';
import { withDirectory } from '@kv/sparse-core/testing';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';

import { needleModel } from '../testing/paths.js';
import { Tokenizer } from './tokenizer.js';

interface Reference {
  decode(ids: number[], options: { skip_special_tokens: boolean; clean_up_tokenization_spaces: boolean }): string;
}
// Its own declarations do not resolve under NodeNext.
const { Tokenizer: ReferenceTokenizer } = library as unknown as {
  readonly Tokenizer: new (definition: object, settings: object) => Reference;
};

const needle = JSON.parse(readFileSync(join(needleModel, 'tokenizer.json'), 'utf8')) as Record<string, unknown>;
const words = ['▁', '▁the', 'm', '▁▁', 'é', '▁😀', '<unk>', '<s>', '\u0301', 'ab▁c'];
const bytes = Array.from({ length: 256 }, (_, byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, '0')}>`);
/** As in a model with a SentencePiece vocabulary, such as Llama 2. */
const sentencePiece = (decoder: object | null): object => ({
  added_tokens: [
    { id: 6, content: '<unk>', special: true },
    { id: 7, content: '<s>', special: true },
  ],
  normalizer: null,
  pre_tokenizer: null,
  post_processor: null,
  decoder,
  model: {
    ...{ type: 'BPE', unk_token: '<unk>', byte_fallback: true, merges: [] },
    vocab: Object.fromEntries([...words, ...bytes].map((token, id) => [token, id])),
  },
});
const replace = { type: 'Replace', pattern: { String: '▁' }, content: ' ' };
const strip = { type: 'Strip', content: ' ', start: 1, stop: 0 };
const sequence = (...decoders: object[]): object => ({ type: 'Sequence', decoders });

describe('decoding from the table gives what the decoder gives', () => {
  const cases: [string, object][] = [
    ['of the small model', needle],
    ['of Llama 2', sentencePiece(sequence(replace, { type: 'ByteFallback' }, { type: 'Fuse' }, strip))],
    ['that replaces behind a fuse', sentencePiece(sequence({ type: 'ByteFallback' }, { type: 'Fuse' }, replace, strip))],
    ['of a Metaspace', sentencePiece({ type: 'Metaspace', replacement: '▁', prepend_scheme: 'always' })],
    ['that strips tokens', sentencePiece(sequence(replace, { type: 'Strip', content: ' ', start: 2, stop: 1 }))],
    ['that is none', sentencePiece(null)],
  ];
  it.each(cases)('%s, whole and token by token', async (_name, definition) => {
    const reference = new ReferenceTokenizer(definition, {});
    const { vocab } = (definition as { model: { vocab: object } }).model;
    const most = Object.keys(vocab).length - 1;
    await withDirectory({ 'tokenizer.json': JSON.stringify(definition) }, async (directory) => {
      using tokenizer = await Tokenizer.open(directory);
      const ids = fc.array(fc.integer({ min: 0, max: most }), { minLength: 1, maxLength: 12 });
      fc.assert(
        fc.property(ids, fc.boolean(), (given, skipSpecialTokens) => {
          const options = { skip_special_tokens: skipSpecialTokens, clean_up_tokenization_spaces: false };
          // The library's decoder of bytes drops U+FEFF where a run of bytes begins with it.
          const wanted = reference.decode(given, options);
          fc.pre(!tokenizer.decode(given).includes('\uFEFF'));
          expect(tokenizer.decode(given, { skipSpecialTokens })).toBe(wanted);
          const stream = tokenizer.stream([], { skipSpecialTokens });
          expect(given.map((id) => stream.push(id)).join('') + stream.end()).toBe(wanted);
        }),
        { numRuns: 2000, seed: 20_261_122 },
      );
    });
  });
});

it('an id that is no token is refused, whatever it is', async () => {
  using tokenizer = await Tokenizer.open(needleModel);
  const given = [{ length: 5e8 }, ['length'], [Symbol('id')], [{ valueOf: () => 1 }], [1n], [NaN]] as unknown[];
  for (const ids of given) {
    expect(() => tokenizer.decode(ids as number[])).toThrow(InvalidValueError);
    expect(() => tokenizer.stream(ids as number[])).toThrow(InvalidValueError);
  }
});
