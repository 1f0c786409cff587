import { CapabilityError } from '@kv/sparse-core';
import { expectBoolean, expectObject, expectOptions, expectSignal, expectThat, isRecord, listOf } from '@kv/sparse-core/native';

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
  readonly signal?: AbortSignal | undefined;
}

type Settings = Readonly<Record<string, unknown>>;

/** The template in tokenizer_config.json: a text, or a list of named ones of which 'default' counts. */
export function findChatTemplate({ chat_template: given }: Settings): string | null {
  if (typeof given === 'string') return given;
  if (!Array.isArray(given)) return null;
  const named = (given as unknown[]).filter(isRecord).find(({ name }) => name === 'default');
  return typeof named?.template === 'string' ? named.template : null;
}

/** The texts of the special tokens that tokenizer_config.json names: templates write them. */
export function specialTokens(settings: Settings): Record<string, string> {
  const tokens: Record<string, string> = {};
  for (const [key, value] of Object.entries(settings)) {
    const text = isRecord(value) ? value.content : value;
    if (key.endsWith('_token') && typeof text === 'string') tokens[key] = text;
  }
  return tokens;
}

const mostMessages = 2 ** 20;

/** @throws InvalidValueError unless these are messages and options; what the template reads of them, it says itself */
export function expectChat(messages: readonly ChatMessage[], options: ChatTemplateOptions): void {
  for (const message of listOf('renderChat', 'messages', messages, mostMessages)) {
    expectObject('renderChat', 'messages', message);
    const { role, content } = message;
    expectThat('renderChat', 'role', role, typeof role === 'string', 'a text, such as user');
    expectThat('renderChat', 'content', content, typeof content === 'string', 'a text');
  }
  expectOptions('renderChat', options, { addGenerationPrompt: true, tools: true, variables: true, signal: true });
  const { addGenerationPrompt = true, tools = [], variables = {}, signal } = options;
  expectBoolean('renderChat', 'addGenerationPrompt', addGenerationPrompt);
  listOf('renderChat', 'tools', tools, mostMessages);
  expectObject('renderChat', 'variables', variables);
  expectSignal('renderChat', signal);
}

/** What a template reads. */
export function templateValues(
  tokens: Readonly<Record<string, string>>,
  messages: readonly ChatMessage[],
  { addGenerationPrompt = true, tools, variables = {} }: ChatTemplateOptions,
): Record<string, unknown> {
  return { ...tokens, ...variables, messages, tools: tools ?? null, add_generation_prompt: addGenerationPrompt };
}

/** @throws CapabilityError when a model has no template */
export function expectChatTemplate(template: string | null): void {
  if (template !== null) return;
  throw new CapabilityError(
    'this model has no chat template: it completes text. Give it a prompt, not messages.',
    {
      subject: 'chat_template',
      given: 'none',
      wanted: 'chat_template in tokenizer_config.json, or chat_template.jinja',
    },
  );
}
