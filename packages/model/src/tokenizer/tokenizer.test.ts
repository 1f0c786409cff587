import { readFileSync } from 'node:fs';
import { join } from 'node:path';

import { CapabilityError, DisposedError, InvalidValueError, ModelFormatError } from '@kv/sparse-core';
import { withDirectory } from '@kv/sparse-core/testing';
import fc from 'fast-check';
import { afterAll, describe, expect, it } from 'vitest';

import { needleModel } from '../testing/paths.js';
import { Tokenizer } from './tokenizer.js';

interface Golden {
  readonly prompts: readonly {
    readonly name: string;
    readonly text: string;
    readonly ids: readonly number[];
  }[];
}

const { prompts } = JSON.parse(readFileSync(join(needleModel, 'golden.json'), 'utf8')) as Golden;
const definition = readFileSync(join(needleModel, 'tokenizer.json'), 'utf8');
const tokenizer = await Tokenizer.open(needleModel);
afterAll(() => {
  tokenizer.dispose();
});

const withSettings = (settings: object, use: (opened: Tokenizer) => Promise<void>): Promise<void> =>
  withDirectory(
    { 'tokenizer.json': definition, 'tokenizer_config.json': JSON.stringify(settings) },
    async (directory) => {
      using opened = await Tokenizer.open(directory);
      await use(opened);
    },
  );

describe('encode', () => {
  it.each(prompts.map(({ name, text, ids }) => [name, text, ids] as const))(
    'gives the ids of the reference tokenizer for %s',
    async (_name, text, ids) => {
      expect([...(await tokenizer.encode(text))]).toEqual(ids);
    },
  );

  it('gives the same ids of a long text', async () => {
    const text = prompts
      .map((prompt) => prompt.text)
      .join('\n')
      .repeat(3);
    expect(text.length).toBeGreaterThan(16_384);
    const whole = await tokenizer.encode(text, { addSpecialTokens: false });
    expect(tokenizer.decode(whole)).toBe(text);
    const [first, second] = await Promise.all([tokenizer.encode(text), tokenizer.encode(text)]);
    expect(first).toEqual(second);
    expect([...first.subarray(1)]).toEqual([...whole]);
  });

  it('stops waiting when its signal is aborted, and answers the next request', async () => {
    const long = 'word '.repeat(100_000);
    const controller = new AbortController();
    const pending = tokenizer.encode(long, { signal: controller.signal });
    controller.abort();
    await expect(pending).rejects.toThrow('aborted');
    await expect(tokenizer.encode('x', { signal: controller.signal })).rejects.toThrow('aborted');
    expect((await tokenizer.encode(long)).length).toBeGreaterThan(100_000);
  });

  it('is refused after dispose', async () => {
    const other = await Tokenizer.open(needleModel);
    const pending = other.encode('x'.repeat(20_000));
    other.dispose();
    await expect(pending).rejects.toThrow(DisposedError);
    await expect(other.encode('x'.repeat(20_000))).rejects.toThrow(DisposedError);
  });
});

describe('decode', () => {
  it('leaves special tokens out, or keeps them', async () => {
    const ids = await tokenizer.encode('héllo 😀');
    expect(tokenizer.decode(ids)).toBe('héllo 😀');
    expect(tokenizer.decode(ids, { skipSpecialTokens: false })).toBe('<|bos|>héllo 😀');
    expect(tokenizer.decode([])).toBe('');
  });

  it.each([4096, -1, 1.5])('refuses id %d, which is not in the vocabulary', (id) => {
    expect(() => tokenizer.decode([id])).toThrow(InvalidValueError);
  });

  it('token by token gives the text of all tokens, never half a character', () => {
    fc.assert(
      fc.property(
        fc.array(fc.integer({ min: 0, max: 4095 }), { maxLength: 40 }),
        fc.nat(10),
        (ids, preceding) => {
          const stream = tokenizer.stream(ids.slice(0, preceding));
          const before = tokenizer.decode(ids.slice(0, preceding));
          const parts = ids.slice(preceding).map((id) => stream.push(id));
          // A prompt that ends inside a character decodes to U+FFFD there: then the whole differs at the
          // seam.
          fc.pre(!before.endsWith('\uFFFD'));
          expect(before + parts.join('') + stream.end()).toBe(tokenizer.decode(ids));
        },
      ),
      { numRuns: 1000, seed: 20_260_103 },
    );
  });

  it('holds a character back until its last byte', async () => {
    const stream = tokenizer.stream();
    const parts = [...(await tokenizer.encode('é😀', { addSpecialTokens: false }))].map((id) =>
      stream.push(id),
    );
    expect(parts).toEqual(['', 'é', '', '', '', '😀'].slice(-parts.length));
    expect(stream.end()).toBe('');
  });

  it('gives U+FFFD at the end for bytes that never became a character', async () => {
    const stream = tokenizer.stream();
    const [first = 0] = await tokenizer.encode('é', { addSpecialTokens: false });
    expect(stream.push(first)).toBe('');
    expect(stream.end()).toBe('\uFFFD');
    expect(stream.end()).toBe('');
  });
});

describe('renderChat', () => {
  const template =
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}" +
    "{{ raise_exception('the system message comes first') }}{% endif %}" +
    '{{ bos_token }}[{{ message.role }}]{{ message.content }}{{ eos_token }}{% endfor %}' +
    '{% if add_generation_prompt %}[assistant]{% endif %}';
  const messages = [{ role: 'user', content: 'Hi' }];
  const settings = { bos_token: '<|bos|>', eos_token: { content: '<|eos|>' } };

  it('renders the template with its special tokens', () =>
    withSettings({ ...settings, chat_template: template }, async (opened) => {
      expect(await opened.renderChat(messages)).toBe('<|bos|>[user]Hi<|eos|>[assistant]');
      expect(await opened.renderChat(messages, { addGenerationPrompt: false })).toBe('<|bos|>[user]Hi<|eos|>');
      const late = [...messages, { role: 'system', content: 'x' }];
      await expect(opened.renderChat(late)).rejects.toThrow(InvalidValueError);
      await expect(opened.renderChat(late)).rejects.toThrow(/the system message comes first/);
    }));

  it('takes the default of several templates, and variables', () => {
    const named = [
      { name: 'tool_use', template: 'x' },
      { name: 'default', template: '{{ mood }}{{ messages[0].content }}' },
    ];
    return withSettings({ ...settings, chat_template: named }, async (opened) => {
      expect(await opened.renderChat(messages, { variables: { mood: 'calm ' } })).toBe('calm Hi');
      const rendered = opened.renderChat(messages, { variables: { mood: () => 'calm' } });
      await expect(rendered).rejects.toThrow(InvalidValueError);
    });
  });

  it('prefers chat_template.jinja', async () => {
    const files = { 'tokenizer.json': definition, 'chat_template.jinja': '{{ messages | length }}' };
    await withDirectory(files, async (directory) => {
      using opened = await Tokenizer.open(directory);
      expect(await opened.renderChat(messages)).toBe('1');
    });
  });

  it('is refused where the model has none', async () => {
    await expect(tokenizer.renderChat(messages)).rejects.toThrow(CapabilityError);
  });
});

describe('a tokenizer is refused', () => {
  const cases: [string, Record<string, string>][] = [
    ['that is missing', {}],
    ['that is no JSON', { 'tokenizer.json': '{' }],
    ['that has no model', { 'tokenizer.json': '{}' }],
    ['that is no object', { 'tokenizer.json': '3' }],
    [
      'whose chat template does not parse',
      { 'tokenizer.json': definition, 'chat_template.jinja': '{% if %}' },
    ],
  ];
  it.each(cases)('%s', async (_name, files) => {
    await withDirectory(files, async (directory) => {
      await expect(Tokenizer.open(directory)).rejects.toThrow(ModelFormatError);
    });
  });
});
