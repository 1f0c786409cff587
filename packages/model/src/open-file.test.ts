import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { chmod, mkdir, symlink, writeFile } from 'node:fs/promises';
import { join } from 'node:path';

import { createDevice, KvError, ModelFormatError } from '@kv/sparse-core';
import { rawFile, withDirectory } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import { Model } from './model.js';
import { needleModel } from './testing/paths.js';
import { randomModel } from './testing/random-model.js';

const json = {
  ...{ model_type: 'llama', vocab_size: 32, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1 },
  ...{ num_attention_heads: 1, max_position_embeddings: 64 },
};
const { files } = randomModel(json);
const tokenizer = readFileSync(join(needleModel, 'tokenizer.json'), 'utf8');
const device = createDevice({ threads: 1 });

const makers: [string, (path: string) => Promise<unknown>][] = [
  ['a directory', (path) => mkdir(path)],
  ['a FIFO', (path) => Promise.resolve(execFileSync('mkfifo', [path]))],
  ['a link to a device without end', (path) => symlink('/dev/zero', path)],
  ['a link to itself', (path) => symlink(path, path)],
  ['an empty file', (path) => writeFile(path, '')],
];
const names = [
  'config.json',
  'generation_config.json',
  'model.safetensors',
  'model.safetensors.index.json',
  'tokenizer.json',
  'tokenizer_config.json',
];

/** Opens a model directory whose file `name` is what `make` makes. */
async function openWith(name: string, make: (path: string) => Promise<unknown>): Promise<void> {
  const all = name.startsWith('tokenizer') ? { ...files, 'tokenizer.json': tokenizer } : files;
  // The index is read only where there is no single file.
  const absent = [name, ...(name === 'model.safetensors.index.json' ? ['model.safetensors'] : [])];
  const others = Object.fromEntries(Object.entries(all).filter(([other]) => !absent.includes(other)));
  await withDirectory(others, async (directory) => {
    await make(join(directory, name));
    (await Model.open(directory, { device })).dispose();
  });
}

const content = (text: string | Uint8Array) => (path: string) => writeFile(path, text);

describe('a model directory is refused in bounded time', () => {
  const cases = makers.flatMap(([what, make]) => names.map((name) => [what, name, make] as const));
  it.each(cases)('with %s as %s', async (_what, name, make) => {
    await expect(openWith(name, make)).rejects.toThrow(ModelFormatError);
  });

  it.skipIf(process.getuid?.() === 0).each(names)('with a %s that may not be read', async (name) => {
    const make = async (path: string): Promise<void> => {
      await writeFile(path, '{}');
      await chmod(path, 0);
    };
    await expect(openWith(name, make)).rejects.toThrow(ModelFormatError);
  });

  const texts: [string, string][] = [
    ['that nest a million deep', '['.repeat(1e6) + ']'.repeat(1e6)],
    ['of objects that nest a million deep', '{"a":'.repeat(1e6) + '1' + '}'.repeat(1e6)],
    ['of four million values', `{"a":[${'[],'.repeat(4e6)}[]]}`],
    ['that are a string of 40 MB', `{"model_type": "${'x'.repeat(40e6)}"}`],
  ];
  it.each(texts)('with JSON files %s', async (_what, text) => {
    const header = rawFile(text);
    const all = names.map((name) => openWith(name, content(name === 'model.safetensors' ? header : text)));
    for (const opened of await Promise.allSettled(all)) {
      const reason: unknown = opened.status === 'rejected' ? opened.reason : undefined;
      expect(reason).toBeInstanceOf(ModelFormatError);
      expect(String(reason).length).toBeLessThan(1000);
    }
  });
});

it('a message quotes the beginning of a long name only', async () => {
  const long = 'x'.repeat(16e6);
  const named = rawFile(JSON.stringify({ [long]: { dtype: long, shape: [], data_offsets: [0, 1] } }));
  for (const [name, text] of [['config.json', `{"model_type":"${long}"}`], ['model.safetensors', named]] as const) {
    const error: unknown = await openWith(name, content(text)).catch((reason: unknown) => reason);
    expect(error).toBeInstanceOf(KvError);
    expect(String(error).length).toBeLessThan(1000);
  }
});

describe('a safetensors header', () => {
  const metadata = (text: string): Uint8Array => {
    const [header, data] = split(files['model.safetensors'] as Uint8Array);
    const tensors = JSON.parse(header) as Record<string, unknown>;
    return rawFile(JSON.stringify({ ...tensors, __metadata__: { text } }), data);
  };

  it.each(['x', '\\', '"', '\n'])('may have a metadata string of 16 MB of %j', async (character) => {
    await openWith('model.safetensors', content(metadata(character.repeat(16e6))));
  });

  it('may have the same key twice only in an inner object', async () => {
    const inner = rawFile('{"__metadata__":{"a":"1","a":"2"}}');
    await expect(openWith('model.safetensors', content(inner))).rejects.toThrow(/lack tensor/);
    const outer = rawFile('{"__metadata__":{"a":"1"},"__metadata__"\n :{"a":"2"}}');
    await expect(openWith('model.safetensors', content(outer))).rejects.toThrow(/'__metadata__' twice/);
  });
});

/** The header and the data of a safetensors file. */
function split(file: Uint8Array): [string, Uint8Array] {
  const end = 8 + Number(new DataView(file.buffer).getBigUint64(0, true));
  return [new TextDecoder().decode(file.subarray(8, end)), file.subarray(end)];
}
