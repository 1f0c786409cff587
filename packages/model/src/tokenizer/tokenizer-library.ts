import * as library from '@huggingface/tokenizers';

/** The part of the tokenizers library in use: its own declarations do not resolve under NodeNext. */
export interface TokenizerLibrary {
  encode(text: string, options: { add_special_tokens: boolean }): { readonly ids: readonly number[] };
  decode(
    ids: number[],
    options: { skip_special_tokens: boolean; clean_up_tokenization_spaces: boolean },
  ): string;
  token_to_id(token: string): number | undefined;
  id_to_token(id: number): string | undefined;
}

interface Library {
  readonly Tokenizer: new (definition: unknown, settings: unknown) => TokenizerLibrary;
}

/** @throws Error when the definition is not one of a tokenizer */
export function createTokenizer(definition: unknown, settings: unknown): TokenizerLibrary {
  return new (library as unknown as Library).Tokenizer(definition, settings);
}
