import { existsSync } from 'node:fs';
import { basename, join } from 'node:path';

import { ModelFormatError } from '@kv/sparse-core';
import { excerpt, readOptionalJson, readSafetensorsHeader, type StoredTensor } from '@kv/sparse-core/native';
import { z } from 'zod';

import { expectDirectory } from '../expect-directory.js';

const singleFile = 'model.safetensors';
const indexFile = 'model.safetensors.index.json';

const indexSchema = z.object({ weight_map: z.record(z.string(), z.string()) });

/**
 * Lists the tensors of a model directory: `model.safetensors` or, where that is absent, the shards that
 * `model.safetensors.index.json` names. Only headers are read.
 * @throws ModelFormatError when a file is missing or malformed, or the index contradicts the shards
 */
export async function readStoredTensors(directory: string): Promise<ReadonlyMap<string, StoredTensor>> {
  await expectDirectory(directory);
  const single = join(directory, singleFile);
  const index = existsSync(single) ? undefined : await readIndex(join(directory, indexFile));
  if (index === undefined) return (await readSafetensorsHeader(single)).tensors;

  const shards = [...new Set(index.values())].sort();
  const headers = await Promise.all(shards.map((shard) => readSafetensorsHeader(join(directory, shard))));
  const tensors = new Map<string, StoredTensor>();
  for (const header of headers) {
    for (const tensor of header.tensors.values()) addTensor(tensors, tensor);
  }
  for (const [name, shard] of index) checkIndexEntry(directory, name, shard, tensors.get(name));
  return tensors;
}

async function readIndex(file: string): Promise<ReadonlyMap<string, string> | undefined> {
  const json = await readOptionalJson(file);
  if (json === undefined) return undefined;
  const parsed = indexSchema.safeParse(json);
  if (!parsed.success || Object.keys(parsed.data.weight_map).length === 0) {
    throw new ModelFormatError(
      `${file}: wanted a 'weight_map' from tensor names to file names. Fetch it again.`,
      {
        subject: file,
        wanted: 'weight_map: { tensor: file }',
      },
    );
  }
  const entries = Object.entries(parsed.data.weight_map);
  for (const [name, shard] of entries) {
    // A shard is a file of this directory: an index must not reach any other.
    if (!/^[^/\\\0]+\.safetensors$/.test(shard) || shard !== basename(shard)) {
      throw new ModelFormatError(
        `${file}: tensor '${excerpt(name)}' names the file '${excerpt(shard)}'; wanted the plain name of a .safetensors file ` +
          'beside the index. Do not use this model before you know where it comes from.',
        { subject: name, given: shard, wanted: 'a plain file name' },
      );
    }
  }
  return new Map(entries);
}

function addTensor(tensors: Map<string, StoredTensor>, tensor: StoredTensor): void {
  const other = tensors.get(tensor.name);
  if (other !== undefined) {
    throw new ModelFormatError(
      `tensor '${excerpt(tensor.name)}' is both in ${other.file} and in ${tensor.file}; wanted it once. ` +
        'Remove the shards of another version of this model.',
      { subject: tensor.name, given: [other.file, tensor.file], wanted: 'one file' },
    );
  }
  tensors.set(tensor.name, tensor);
}

function checkIndexEntry(
  directory: string,
  name: string,
  shard: string,
  tensor: StoredTensor | undefined,
): void {
  const wanted = join(directory, shard);
  if (tensor?.file === wanted) return;
  const given = tensor === undefined ? 'no shard' : tensor.file;
  throw new ModelFormatError(
    `${join(directory, indexFile)} says that tensor '${excerpt(name)}' is in ${shard}, but ${given} has it. ` +
      'The index and the shards are of different versions; fetch both again.',
    { subject: name, given, wanted },
  );
}
