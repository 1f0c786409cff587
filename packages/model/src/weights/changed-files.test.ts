import { open, rename, utimes, writeFile } from 'node:fs/promises';
import { join } from 'node:path';

import { createDevice, ModelFormatError } from '@kv/sparse-core';
import { withDirectory } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import { prefill } from '../generate/prefill.js';
import { Model } from '../model.js';
import { randomModel } from '../testing/random-model.js';

const json = {
  ...{ model_type: 'llama', vocab_size: 32, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1 },
  ...{ num_attention_heads: 1, max_position_embeddings: 64 },
};
const { files } = randomModel(json, 2);
const shard = 'model-00002-of-00002.safetensors';
const bytes = files[shard] as Uint8Array;

/** Reads a prompt, changes a file of weights, and reads another. */
function readAfter(change: (file: string) => Promise<unknown>): Promise<number> {
  return withDirectory(files, async (directory) => {
    using model = await Model.open(directory, { device: createDevice({ threads: 1 }) });
    using runner = model.createRunner({ sequences: 2 });
    using first = runner.openSequence();
    (await prefill(runner, first, [1, 2, 3])).dispose();
    await change(join(directory, shard));
    using second = runner.openSequence();
    using logits = await prefill(runner, second, [1, 2, 3]);
    return (await logits.read()).length;
  });
}

async function withFile(file: string, change: (handle: Awaited<ReturnType<typeof open>>) => Promise<unknown>): Promise<void> {
  const handle = await open(file, 'r+');
  await change(handle).finally(() => handle.close());
}

describe('a file of weights that changes while its model is open', () => {
  const changes: [string, (file: string) => Promise<unknown>, RegExp][] = [
    ['is truncated', (file) => withFile(file, (handle) => handle.truncate(64)), /has 64 bytes, and had \d+ bytes/],
    ['is extended', (file) => withFile(file, (handle) => handle.truncate(1e6)), /has 1000000 bytes, and had/],
    ['is written to', (file) => withFile(file, (handle) => handle.write(Buffer.from([1]), 0, 1, 200)), /time of change/],
    ['is written anew in place', (file) => writeFile(file, bytes), /time of change/],
    ['gets another time of change', (file) => utimes(file, 0, 0), /time of change of 1970/],
  ];
  it.each(changes)('and %s fails the next prompt', async (_name, change, message) => {
    await expect(readAfter(change)).rejects.toThrow(ModelFormatError);
    await expect(readAfter(change)).rejects.toThrow(message);
  });

  it('changes nothing when another is renamed over it', async () => {
    const replaced = readAfter(async (file) => {
      await writeFile(`${file}.new`, bytes.slice().fill(0));
      await rename(`${file}.new`, file);
    });
    expect(await replaced).toBe(json.vocab_size);
  });
});
