import { join } from 'node:path';

import { ModelFormatError } from '@kv/sparse-core';
import { safetensorsFile, withDirectory } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import { goldenDirectory } from '../testing/paths.js';
import { readStoredTensors } from './weight-files.js';

const one = { dtype: 'F32', shape: [2] } as const;
const shardName = (shard: number): string => `model-${String(shard).padStart(5, '0')}-of-00017.safetensors`;
const index = (map: Record<string, unknown>): string => JSON.stringify({ metadata: {}, weight_map: map });
const files = {
  first: 'model-1.safetensors',
  second: 'model-2.safetensors',
  index: 'model.safetensors.index.json',
};

describe('the tensors of a model directory', () => {
  it('come from one file', async () => {
    const tensors = await readStoredTensors(join(goldenDirectory, 'llama2-mha'));
    expect(tensors.get('model.embed_tokens.weight')).toMatchObject({ dtype: 'F32', shape: [320, 96] });
  });

  it('come from shards', async () => {
    const tensors = await readStoredTensors(join(goldenDirectory, 'mistral'));
    expect(tensors.get('model.layers.1.mlp.down_proj.weight')).toMatchObject({
      dtype: 'F16',
      shape: [96, 192],
    });
    expect(new Set([...tensors.values()].map(({ file }) => file)).size).toBe(6);
  });

  it('come from 17 shards', async () => {
    const shards = Array.from({ length: 17 }, (_, shard) => shardName(shard + 1));
    const map = Object.fromEntries(shards.map((shard, layer) => [`layer.${layer}`, shard]));
    const content = Object.fromEntries(
      shards.map((shard, layer) => [shard, safetensorsFile({ [`layer.${layer}`]: one })]),
    );
    const names = await withDirectory({ ...content, [files.index]: index(map) }, async (directory) => [
      ...(await readStoredTensors(directory)).keys(),
    ]);
    expect(names.sort()).toEqual(Object.keys(map).sort());
  });
});

describe('a model directory is refused', () => {
  const first = safetensorsFile({ a: one });
  const second = safetensorsFile({ b: one });
  const cases: [string, Record<string, Uint8Array | string>, RegExp][] = [
    ['that is empty', {}, /model\.safetensors cannot be opened/],
    [
      'whose shard is missing',
      { [files.first]: first, [files.index]: index({ a: files.first, b: files.second }) },
      /model-2.*cannot be opened/,
    ],
    [
      'whose shard is truncated',
      { [files.first]: first.subarray(0, -1), [files.index]: index({ a: files.first }) },
      /truncated/,
    ],
    [
      'whose shard lacks a tensor of the index',
      { [files.first]: first, [files.index]: index({ a: files.first, c: files.first }) },
      /'c' is in model-1.safetensors, but no shard/,
    ],
    [
      'whose index names the wrong shard',
      {
        [files.first]: first,
        [files.second]: second,
        [files.index]: index({ a: files.second, b: files.second }),
      },
      /'a' is in model-2/,
    ],
    [
      'with a tensor in two shards',
      {
        [files.first]: first,
        [files.second]: safetensorsFile({ a: one, b: one }),
        [files.index]: index({ a: files.first, b: files.second }),
      },
      /'a' is both in/,
    ],
    ['whose index is no JSON', { [files.index]: '{' }, /not valid JSON/],
    ['whose index has no weight_map', { [files.index]: '{"metadata": {}}' }, /weight_map/],
    ['whose index is empty', { [files.index]: index({}) }, /weight_map/],
    ['whose index maps to no names', { [files.index]: index({ a: 1 }) }, /weight_map/],
    ...[
      '../secret.safetensors',
      '/etc/x.safetensors',
      'a\\b.safetensors',
      '..',
      'weights.bin',
      'x\0.safetensors',
    ].map((path): [string, Record<string, string>, RegExp] => [
      `whose index points to ${JSON.stringify(path)}`,
      { [files.index]: index({ a: path }) },
      /plain name/,
    ]),
  ];
  it.each(cases)('%s', async (_name, content, message) => {
    await withDirectory(content, async (directory) => {
      const error: unknown = await readStoredTensors(directory).catch((reason: unknown) => reason);
      expect(error).toBeInstanceOf(ModelFormatError);
      expect(String(error)).toMatch(message);
    });
  });

  it('that is a file', async () => {
    await withDirectory({ 'model.safetensors': 'x' }, async (directory) => {
      await expect(readStoredTensors(join(directory, 'model.safetensors'))).rejects.toThrow(ModelFormatError);
    });
  });
});
