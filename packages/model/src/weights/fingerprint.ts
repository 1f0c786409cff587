import { createHash } from 'node:crypto';

import { ModelFormatError } from '@kv/sparse-core';
import { openFile, readBytes } from '@kv/sparse-core/native';

import type { ModelConfig } from '../config/model-config.js';
import { readStoredTensors } from '../safetensors/weight-files.js';

/** Of each tensor: enough that another model's differ. An 8B model is told by 1.2 MB. */
const readOfTensor = 4096;

/**
 * 64 hexadecimal digits that tell a model from others: SHA-256 of how its keys are rotated and, for each tensor, in the
 * order of their names, of its name, dtype, shape and first 4096 bytes.
 * @throws ModelFormatError when a file is missing or malformed
 */
export async function fingerprint(directory: string, { rope }: ModelConfig): Promise<string> {
  const stored = [...(await readStoredTensors(directory)).values()];
  const facts = new Map<string, Uint8Array>();
  for (const file of new Set(stored.map((tensor) => tensor.file))) {
    const handle = await openFile(file);
    if (handle === undefined) {
      throw new ModelFormatError(`${file} is gone. Fetch the model directory again.`, { subject: file, given: 'no such file' });
    }
    try {
      for (const { name, dtype, shape, byteOffset, byteLength } of stored.filter((tensor) => tensor.file === file)) {
        const bytes = await readBytes(handle, byteOffset, Math.min(byteLength, readOfTensor));
        facts.set(name, Buffer.concat([Buffer.from(JSON.stringify([name, dtype, shape])), bytes]));
      }
    } finally {
      await handle.close();
    }
  }
  const hash = createHash('sha256').update(JSON.stringify([rope.theta, rope.scaling]));
  for (const name of [...facts.keys()].sort()) hash.update(facts.get(name) ?? '');
  return hash.digest('hex');
}
