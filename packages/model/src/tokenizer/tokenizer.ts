import { join } from 'node:path';

import { InvalidValueError, ModelFormatError } from '@kv/sparse-core';

import { isRecord, readJson, readOptionalJson, readOptionalText } from '../read-json.js';
import { ChatTemplate, findChatTemplate } from './chat-template.js';
import type { ChatMessage, ChatTemplateOptions } from './chat-template.js';
import { StreamDecoder } from './stream-decoder.js';
import { createTokenizer } from './tokenizer-library.js';
import type { TokenizerLibrary } from './tokenizer-library.js';
import { TokenizerWorker } from './tokenizer-worker.js';

/** Texts longer than this, in UTF-16 units, are tokenised on a worker thread: about 10 ms of work. */
const workerThreshold = 16_384;

export interface EncodeOptions {
  /**
   * Add what the tokenizer's template adds around a text, such as a begin-of-sequence token. Default true.
   */
  readonly addSpecialTokens?: boolean | undefined;
  readonly signal?: AbortSignal | undefined;
}

export interface DecodeOptions {
  /** Leave special tokens out of the text. Default true. */
  readonly skipSpecialTokens?: boolean | undefined;
}

/** Text to token ids and back, as a model directory's tokenizer.json says. */
export class Tokenizer implements Disposable {
  readonly bosToken: string | null;
  readonly eosToken: string | null;
  readonly #library: TokenizerLibrary;
  readonly #worker: TokenizerWorker;
  readonly #template: ChatTemplate | null;

  private constructor(
    library: TokenizerLibrary,
    worker: TokenizerWorker,
    settings: Record<string, unknown>,
    template: string | null,
  ) {
    this.#library = library;
    this.#worker = worker;
    this.bosToken = tokenText(settings.bos_token);
    this.eosToken = tokenText(settings.eos_token);
    this.#template = template === null ? null : new ChatTemplate(template, settings);
  }

  /**
   * Opens the tokenizer of a model directory: tokenizer.json, tokenizer_config.json and, where it is there,
   * chat_template.jinja.
   * @throws ModelFormatError when a file is missing or malformed
   */
  static async open(directory: string): Promise<Tokenizer> {
    const file = join(directory, 'tokenizer.json');
    const [definition, settings, templateFile] = await Promise.all([
      readJson(file),
      readOptionalJson(join(directory, 'tokenizer_config.json')),
      readOptionalText(join(directory, 'chat_template.jinja')),
    ]);
    const config = isRecord(settings) ? settings : {};
    try {
      const library = createTokenizer(definition, config);
      const worker = new TokenizerWorker(file, config);
      return new Tokenizer(library, worker, config, templateFile ?? findChatTemplate(config));
    } catch (cause) {
      if (cause instanceof ModelFormatError) throw cause;
      const reason = cause instanceof Error ? cause.message : String(cause);
      throw new ModelFormatError(`${file} is no tokenizer that can be read (${reason}). Fetch it again.`, {
        subject: file,
        wanted: 'a tokenizer.json of the tokenizers library',
        cause,
      });
    }
  }

  /**
   * Token ids of a text, i32. A long text is tokenised off the JavaScript thread.
   * @throws the signal's reason when it is aborted
   */
  async encode(text: string, { addSpecialTokens = true, signal }: EncodeOptions = {}): Promise<Int32Array> {
    signal?.throwIfAborted();
    if (text.length > workerThreshold) return this.#worker.encode(text, addSpecialTokens, signal);
    return Int32Array.from(this.#library.encode(text, { add_special_tokens: addSpecialTokens }).ids);
  }

  /** The text that token ids spell, bytes that are no UTF-8 as U+FFFD. */
  decode(ids: ArrayLike<number>, { skipSpecialTokens = true }: DecodeOptions = {}): string {
    if (ids.length === 0) return '';
    return this.#library.decode(
      Array.from(ids, (id) => this.#known(id)),
      {
        skip_special_tokens: skipSpecialTokens,
        clean_up_tokenization_spaces: false,
      },
    );
  }

  /**
   * A decoder that gives text as tokens arrive, never half a character.
   * @param preceding ids of the prompt: a tokenizer may spell a word's leading space only after other text
   */
  stream(preceding: ArrayLike<number> = [], options: DecodeOptions = {}): StreamDecoder {
    return new StreamDecoder((ids) => this.decode(ids, options), preceding);
  }

  /** The id of a token's exact text, or undefined when the vocabulary lacks it. */
  tokenId(token: string): number | undefined {
    return this.#library.token_to_id(token);
  }

  /**
   * The prompt text of a conversation; encode it with `addSpecialTokens: false`.
   * @throws CapabilityError when the model has no chat template
   * @throws InvalidValueError when the template refuses the messages
   */
  renderChat(messages: readonly ChatMessage[], options: ChatTemplateOptions = {}): string {
    return ChatTemplate.require(this.#template).render(messages, options);
  }

  /** Ends the worker thread, if one was started. */
  dispose(): void {
    this.#worker.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }

  #known(id: number): number {
    if (this.#library.id_to_token(id) === undefined) {
      throw new InvalidValueError(`token id ${id} is not in the vocabulary; decode ids of this tokenizer.`, {
        subject: 'token id',
        given: id,
        wanted: 'an id of the vocabulary',
      });
    }
    return id;
  }
}

/** A token in tokenizer_config.json: its text, or an object that holds it. */
function tokenText(token: unknown): string | null {
  const text = isRecord(token) ? token.content : token;
  return typeof text === 'string' ? text : null;
}
