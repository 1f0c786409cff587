import { Template } from '@huggingface/jinja';
import { CapabilityError, InvalidValueError, ModelFormatError } from '@kv/sparse-core';

import { isRecord } from '../read-json.js';

/** One message of a conversation; a template may read further fields, such as `tool_calls`. */
export interface ChatMessage {
  readonly role: string;
  readonly content: string;
  readonly [field: string]: unknown;
}

export interface ChatTemplateOptions {
  /** End with the opening of an answer. Default true. */
  readonly addGenerationPrompt?: boolean | undefined;
  /** JSON schemas of the functions that the model may call. */
  readonly tools?: readonly unknown[] | undefined;
  /** Further variables of the template, such as `enable_thinking`. */
  readonly variables?: Readonly<Record<string, unknown>> | undefined;
}

/** The Jinja template that a model directory ships, which turns messages into a prompt. */
export class ChatTemplate {
  readonly #template: Template;
  readonly #tokens: Readonly<Record<string, string>>;

  /**
   * @param settings the content of tokenizer_config.json: templates name its special tokens
   * @throws ModelFormatError when the template does not parse
   */
  constructor(source: string, settings: Readonly<Record<string, unknown>>) {
    try {
      this.#template = new Template(source);
    } catch (cause) {
      throw new ModelFormatError(`the chat template does not parse (${reasonOf(cause)}). Fetch it again.`, {
        subject: 'chat_template',
        wanted: 'a Jinja template',
        cause,
      });
    }
    this.#tokens = specialTokens(settings);
  }

  /** The template itself. @throws CapabilityError when there is none */
  static require(template: ChatTemplate | null): ChatTemplate {
    if (template !== null) return template;
    throw new CapabilityError(
      'this model has no chat template: it completes text. Give it a prompt, not messages.',
      {
        subject: 'chat_template',
        given: 'none',
        wanted: 'chat_template in tokenizer_config.json, or chat_template.jinja',
      },
    );
  }

  /** @throws InvalidValueError when the template refuses the messages */
  render(messages: readonly ChatMessage[], options: ChatTemplateOptions): string {
    const { addGenerationPrompt = true, tools = null, variables = {} } = options;
    try {
      return this.#template.render({
        ...this.#tokens,
        ...variables,
        messages,
        tools,
        add_generation_prompt: addGenerationPrompt,
      });
    } catch (cause) {
      throw new InvalidValueError(
        `the model's chat template refuses these messages: ${reasonOf(cause)}. Change their roles or order.`,
        {
          subject: 'messages',
          given: messages.map(({ role }) => role),
          wanted: 'messages the template accepts',
          cause,
        },
      );
    }
  }
}

/** The template in tokenizer_config.json: a text, or a list of named ones of which 'default' counts. */
export function findChatTemplate(settings: Readonly<Record<string, unknown>>): string | null {
  const given = settings.chat_template;
  if (typeof given === 'string') return given;
  if (!Array.isArray(given)) return null;
  const named = (given as unknown[]).filter(isRecord).find(({ name }) => name === 'default');
  return typeof named?.template === 'string' ? named.template : null;
}

function specialTokens(settings: Readonly<Record<string, unknown>>): Record<string, string> {
  const tokens: Record<string, string> = {};
  for (const [key, value] of Object.entries(settings)) {
    const text = isRecord(value) ? value.content : value;
    if (key.endsWith('_token') && typeof text === 'string') tokens[key] = text;
  }
  return tokens;
}

function reasonOf(cause: unknown): string {
  return cause instanceof Error ? cause.message : String(cause);
}
