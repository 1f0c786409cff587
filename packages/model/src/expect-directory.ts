import { stat } from 'node:fs/promises';

import { ModelFormatError } from '@kv/sparse-core';
import { expectThat } from '@kv/sparse-core/native';

/** @throws InvalidValueError unless it is one, whether or not anything is there */
export function expectPath(given: unknown): void {
  const isPath = typeof given === 'string' && given !== '' && !given.includes('\0');
  expectThat('a model', 'directory', given, isPath, 'the path of a directory');
}

/**
 * @throws InvalidValueError when it is no path
 * @throws ModelFormatError unless `directory` is one. Names of models look like paths, so it says how to download one.
 */
export async function expectDirectory(directory: string): Promise<void> {
  expectPath(directory);
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
