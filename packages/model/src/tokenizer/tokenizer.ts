import { join } from 'node:path';

import { CapabilityError, InvalidValueError, KvError, ModelFormatError } from '@kv/sparse-core';
import {
  expectBoolean,
  expectOptions,
  expectSignal,
  expectThat,
  isRecord,
  listOf,
  openFile,
  parseJson,
  readOptionalText,
} from '@kv/sparse-core/native';

import { expectPath } from '../expect-directory.js';
import { expectChat, expectChatTemplate, findChatTemplate, specialTokens, templateValues } from './chat-template.js';
import type { ChatMessage, ChatTemplateOptions } from './chat-template.js';
import { StreamDecoder } from './stream-decoder.js';
import { tokenizerLimits } from './tokenizer-limits.js';
import { Refusal, TokenizerProcess } from './tokenizer-process.js';
import type { TokenizerParts } from './tokenizer-process.js';
import { Vocabulary } from './vocabulary.js';

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

/**
 * Text to token ids and back, as a model directory's tokenizer.json says. What the files decide (regular expressions,
 * merges, the chat template) runs in a process of its own, within limits of time and memory; decoding reads a table.
 */
export class Tokenizer implements Disposable {
  readonly bosToken: string | null;
  readonly eosToken: string | null;
  readonly #file: string;
  readonly #process: TokenizerProcess;
  readonly #vocabulary: Vocabulary;
  readonly #template: string | null;
  readonly #tokens: Readonly<Record<string, string>>;

  /** Whether it is one, and no look-alike or proxy. */
  static is(value: unknown): value is Tokenizer {
    return typeof value === 'object' && value !== null && #vocabulary in value;
  }

  private constructor(
    { definitionFile, template }: TokenizerParts,
    process: TokenizerProcess,
    vocabulary: Vocabulary,
    tokens: Readonly<Record<string, string>>,
  ) {
    this.#file = definitionFile;
    this.#process = process;
    this.#vocabulary = vocabulary;
    this.#template = template;
    this.#tokens = tokens;
    this.bosToken = tokens.bos_token ?? null;
    this.eosToken = tokens.eos_token ?? null;
  }

  /**
   * Opens the tokenizer of a model directory: tokenizer.json, tokenizer_config.json and, where it is there,
   * chat_template.jinja.
   * @throws ModelFormatError when a file is missing or malformed, or takes too much time or memory
   * @throws CapabilityError when its decoder does not spell a text token by token
   */
  static async open(directory: string): Promise<Tokenizer> {
    expectPath(directory);
    const { parts, tokens } = await readParts(directory);
    const process = new TokenizerProcess(parts);
    try {
      return new Tokenizer(parts, process, new Vocabulary(await process.open()), tokens);
    } catch (error) {
      process.dispose();
      throw error instanceof Refusal ? refusedFile(parts.definitionFile, error) : error;
    }
  }

  /**
   * Token ids of a text, i32.
   * @throws ModelFormatError when the tokenizer makes a token without an id, or takes too much time or memory
   * @throws the signal's reason when it is aborted
   */
  async encode(text: string, options: EncodeOptions = {}): Promise<Int32Array> {
    expectText('encode', 'text', text);
    expectOptions('encode', options, { addSpecialTokens: true, signal: true });
    const { addSpecialTokens = true, signal } = options;
    expectBoolean('encode', 'addSpecialTokens', addSpecialTokens);
    expectSignal('encode', signal);
    signal?.throwIfAborted();
    try {
      return await this.#process.encode(text, addSpecialTokens, signal);
    } catch (error) {
      throw error instanceof Refusal ? refusedFile(this.#file, error) : error;
    }
  }

  /** The text that token ids spell, bytes that are no UTF-8 as U+FFFD. @throws InvalidValueError for other ids */
  decode(ids: ArrayLike<number>, options: DecodeOptions = {}): string {
    return this.#vocabulary.decode(listOf('decode', 'ids', ids, mostIds), skipsSpecialTokens('decode', options));
  }

  /**
   * A decoder that gives text as tokens arrive, never half a character.
   * @param preceding ids of the prompt: a tokenizer may spell a word's leading space only after other text
   */
  stream(preceding: ArrayLike<number> = [], options: DecodeOptions = {}): StreamDecoder {
    const ids = listOf('stream', 'preceding', preceding, mostIds);
    return new StreamDecoder(this.#vocabulary, skipsSpecialTokens('stream', options), ids);
  }

  /** The id of a token's exact text, or undefined when the vocabulary lacks it. */
  async tokenId(token: string): Promise<number | undefined> {
    expectText('tokenId', 'token', token);
    return await this.#process.tokenId(token);
  }

  /**
   * The prompt text of a conversation; encode it with `addSpecialTokens: false`.
   * @throws CapabilityError when the model has no chat template
   * @throws InvalidValueError when the template refuses the messages
   * @throws ModelFormatError when it takes too much time or memory
   * @throws the signal's reason when it is aborted
   */
  async renderChat(messages: readonly ChatMessage[], options: ChatTemplateOptions = {}): Promise<string> {
    expectChat(messages, options);
    options.signal?.throwIfAborted();
    expectChatTemplate(this.#template);
    try {
      return await this.#process.render(templateValues(this.#tokens, messages, options), options.signal);
    } catch (cause) {
      if (cause instanceof KvError || options.signal?.aborted === true) throw cause;
      const reason = cause instanceof Error ? cause.message : String(cause);
      throw new InvalidValueError(
        `the model's chat template refuses these messages: ${reason}. Change their roles or order.`,
        {
          subject: 'messages',
          given: messages.map(({ role }) => role),
          wanted: 'messages the template accepts',
          cause,
        },
      );
    }
  }

  /** Ends the tokenizer's process. */
  dispose(): void {
    this.#process.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}

/** More than any context holds. */
const mostIds = 2 ** 24;

function expectText(operation: string, name: string, given: unknown): void {
  expectThat(operation, name, given, typeof given === 'string', 'a text');
}

function skipsSpecialTokens(operation: string, options: DecodeOptions): boolean {
  expectOptions(operation, options, { skipSpecialTokens: true });
  const { skipSpecialTokens = true } = options;
  expectBoolean(operation, 'skipSpecialTokens', skipSpecialTokens);
  return skipSpecialTokens;
}

async function readParts(directory: string): Promise<{ parts: TokenizerParts; tokens: Record<string, string> }> {
  const definitionFile = join(directory, 'tokenizer.json');
  const settingsFile = join(directory, 'tokenizer_config.json');
  const [definitionBytes, settingsText, templateFile] = await Promise.all([
    measureDefinition(definitionFile),
    readOptionalText(settingsFile),
    readOptionalText(join(directory, 'chat_template.jinja')),
  ]);
  const given = settingsText === undefined ? {} : parseJson(settingsFile, settingsText).value;
  const settings = isRecord(given) ? given : {};
  const template = templateFile ?? findChatTemplate(settings);
  const parts = { definitionFile, definitionBytes, settings: isRecord(given) ? (settingsText ?? '{}') : '{}', template };
  return { parts, tokens: specialTokens(settings) };
}

/** The bytes of a tokenizer.json, which only its process reads. */
async function measureDefinition(file: string): Promise<number> {
  const handle = await openFile(file);
  const size = handle === undefined ? 0 : (await handle.stat()).size;
  await handle?.close();
  if (size > 0 && size <= tokenizerLimits.definitionBytes) return size;
  const given = handle === undefined ? 'no such file' : `${size} bytes`;
  const wanted = `a tokenizer.json of at most ${tokenizerLimits.definitionBytes} bytes`;
  throw new ModelFormatError(`${file}: given ${given}, wanted ${wanted}. Fetch the whole directory again.`, {
    subject: file,
    given,
    wanted,
  });
}

function refusedFile(file: string, cause: Refusal): KvError {
  const { message, of } = cause;
  if (of === 'decoder') {
    return new CapabilityError(
      `${file}: ${message} does not spell a text token by token. Use a model with a byte-level or SentencePiece BPE.`,
      { subject: file, given: message, wanted: 'a decoder of ByteLevel, ByteFallback, Replace, Metaspace or Strip', cause },
    );
  }
  if (of === 'template') {
    return new ModelFormatError(`the chat template does not parse (${message}). Fetch it again.`, {
      subject: 'chat_template',
      wanted: 'a Jinja template',
      cause,
    });
  }
  return new ModelFormatError(`${file} is no tokenizer that can be used (${message}). Fetch it again.`, {
    subject: file,
    wanted: 'a tokenizer.json of the tokenizers library',
    cause,
  });
}
