import { open, readFile } from 'node:fs/promises';
import { totalmem } from 'node:os';
import { join } from 'node:path';
import { setTimeout } from 'node:timers/promises';

import { createDevice, DisposedError, ModelFormatError } from '@kv/sparse-core';
import { rawFile, withDirectory } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import { prefill } from './generate/prefill.js';
import { Model } from './model.js';
import { goldenModel } from './testing/golden.js';
import { needleModel } from './testing/paths.js';
import { randomModel } from './testing/random-model.js';
import { runBatch } from './testing/run-model.js';
import { describeOnEachKind } from './testing/test-devices.js';
import { layerShapes, outerShapes } from './weights/weight-shapes.js';

const json = {
  ...{ model_type: 'llama', vocab_size: 32, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1 },
  ...{ num_attention_heads: 1, max_position_embeddings: 64 },
};
const device = createDevice({ threads: 1 });

describe('a model', () => {
  it('opens with a tokenizer, on a device of its own', async () => {
    using model = await Model.open(needleModel);
    expect(model.device.kind).toBe('cpu');
    expect(model.tokenizer.eosToken).toBe('<|eos|>');
  });

  it('opens without a tokenizer, and says so when one is asked for', async () => {
    using model = await Model.open(goldenModel('mistral'), { device });
    expect(() => model.tokenizer).toThrow(ModelFormatError);
    expect(() => model.tokenizer).toThrow(/has no tokenizer.json/);
  });

  it('opens when its weights are larger than the memory', async () => {
    // All holes: the file takes no space, and pages of it are read only when they are used.
    // Rows so wide that the numbers of all of them are ids.
    const wide = { ...json, hidden_size: 1024, vocab_size: 1, tie_word_embeddings: true };
    const vocabulary = Math.ceil((1.5 * totalmem()) / (4 * wide.hidden_size));
    const large = { ...wide, vocab_size: vocabulary };
    const { config } = randomModel(wide);
    let offset = 0;
    const shapes = { ...outerShapes({ ...config, vocabularySize: vocabulary }), ...layerShapes(config, 0) };
    const entries = Object.entries(shapes).map(([name, shape]) => {
      const begin = offset;
      offset += shape.reduce((product, extent) => product * extent, 4);
      return [name, { dtype: 'F32', shape, data_offsets: [begin, offset] }];
    });
    const text = JSON.stringify(Object.fromEntries(entries));
    // Padded, so that the weights are aligned whatever the vocabulary's number of digits.
    const header = rawFile(text.padEnd(Math.ceil(text.length / 8) * 8));
    await withDirectory(
      { 'config.json': JSON.stringify(large), 'model.safetensors': header },
      async (directory) => {
        const file = await open(join(directory, 'model.safetensors'), 'r+');
        await file.truncate(header.byteLength + offset);
        await file.close();
        const own = createDevice();
        using model = await Model.open(directory, { device: own });
        expect(model.weights.embedding.byteLength).toBeGreaterThan(totalmem());
        expect(own.memory().live).toBe(0);
        using runner = model.createRunner({ contextTokens: 8, maxBatchRows: 2 });
        using batch = runner.createBatch([
          { sequence: runner.openSequence(), ids: [0, vocabulary - 1], phase: 'prefill' },
        ]);
        await runBatch(runner, batch);
        expect(await batch.hidden.read()).toEqual(new Float32Array(2 * wide.hidden_size));
      },
    );
  });

  it('reads weights that lie misaligned in their file', async () => {
    const model = randomModel(json);
    const bytes = model.files['model.safetensors'] as Uint8Array;
    const headerBytes = Number(new DataView(bytes.buffer).getBigUint64(0, true));
    const header = new TextDecoder().decode(bytes.subarray(8, 8 + headerBytes)).trimEnd();
    const padded = header.padEnd(Math.ceil(header.length / 4) * 4 + 3);
    const shifted = rawFile(padded, bytes.subarray(8 + headerBytes));
    await withDirectory({ ...model.files, 'model.safetensors': shifted }, async (directory) => {
      const own = createDevice();
      const opened = await Model.open(directory, { device: own });
      expect(await opened.weights.finalNorm.read()).toEqual(model.weights.get('model.norm.weight'));
      opened.dispose();
      await own.defaultStream.synchronize();
      expect(own.memory().live).toBe(0);
    });
  });

  it('has a fingerprint, that of its copies and of no other model', async () => {
    const fingerprintOf = (files: Record<string, Uint8Array | string>) =>
      withDirectory(files, async (directory) => {
        using model = await Model.open(directory, { device });
        return await model.fingerprint();
      });
    const { files } = randomModel(json);
    const own = await fingerprintOf(files);
    expect(own).toMatch(/^[0-9a-f]{64}$/);
    const sharded = randomModel(json, 2).files;
    expect(await fingerprintOf(sharded)).toBe(own);
    expect(await fingerprintOf({ ...files, 'config.json': JSON.stringify({ ...json, eos_token_id: 3 }, null, 2) })).toBe(own);
    const weights = (files['model.safetensors'] as Uint8Array).slice();
    const last = weights.length - 1;
    weights[last] = (weights[last] ?? 0) ^ 1;
    expect(await fingerprintOf({ ...files, 'model.safetensors': weights })).not.toBe(own);
    expect(await fingerprintOf({ ...files, 'config.json': JSON.stringify({ ...json, rope_theta: 123 }) })).not.toBe(own);
  });

  it('is refused after it was disposed', async () => {
    const model = await Model.open(goldenModel('mistral'), { device });
    using runner = model.createRunner({ contextTokens: 64 });
    const sequence = runner.openSequence();
    using batch = runner.createBatch([{ sequence, ids: [1, 2], phase: 'prefill' }]);
    model.dispose();
    expect(() => {
      runner.embed(batch);
    }).toThrow(DisposedError);
    expect(() => model.createRunner({ contextTokens: 64 })).toThrow('The model was disposed; open it again');
    await expect(prefill(runner, sequence, [1, 2])).rejects.toThrow('The model was disposed; open it again');
  });

  it.each([
    ['that does not exist', '/nowhere'],
    ['without config.json', join(needleModel, 'eval')],
  ])('is refused from a directory %s', async (_name, directory) => {
    await expect(Model.open(directory, { device })).rejects.toThrow(ModelFormatError);
  });

  it('is refused when config and weights contradict each other', async () => {
    const { files } = randomModel(json);
    const other = { ...files, 'config.json': JSON.stringify({ ...json, num_hidden_layers: 2 }) };
    await withDirectory(other, async (directory) => {
      await expect(Model.open(directory, { device })).rejects.toThrow(/lack tensor 'model.layers.1/);
    });
  });
});

describeOnEachKind('a model', (kind) => {
  it.skipIf(process.platform !== 'linux')('unmaps its files, once they are copied to a device or it is disposed', async () => {
    const isMapped = async (directory: string) => (await readFile('/proc/self/maps', 'utf8')).includes(directory);
    await withDirectory(randomModel(json, 2).files, async (directory) => {
      const model = await Model.open(directory, { device: createDevice({ kind, threads: 1 }) });
      if (kind === 'cpu') {
        expect(await isMapped(directory)).toBe(true);
        model.dispose();
      }
      while (await isMapped(directory)) await setTimeout(10);
      model.dispose();
    });
  });
});
