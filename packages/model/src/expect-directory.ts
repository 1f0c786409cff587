import { stat } from 'node:fs/promises';

import { ModelFormatError } from '@kv/sparse-core';

/**
 * @throws ModelFormatError unless `directory` is one. Names of models look like paths, so it says how to download one.
 */
export async function expectDirectory(directory: string): Promise<void> {
  const facts = await stat(directory).catch(() => undefined);
  if (facts?.isDirectory() === true) return;
  const given = facts === undefined ? 'no such directory' : 'not a directory';
  const download = /^[\w.-]+\/[\w.-]+$/.test(directory)
    ? ` If that is the name of a model on Hugging Face, "hf download ${directory} --local-dir ${directory}" downloads it.`
    : '';
  throw new ModelFormatError(
    `${directory}: ${given}. A model is opened from a directory that holds config.json, tokenizer.json and ` +
      `*.safetensors.${download}`,
    { subject: directory, given, wanted: 'a model directory' },
  );
}
