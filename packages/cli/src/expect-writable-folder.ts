import { constants } from 'node:fs';
import { access } from 'node:fs/promises';
import { dirname, resolve } from 'node:path';

import { InvalidValueError } from '@kv/sparse-core';

/**
 * What takes long has a place for its result: that is found out before.
 * @throws InvalidValueError
 */
export async function expectWritableFolder(file: string, subject: string): Promise<void> {
  const folder = dirname(resolve(file));
  await access(folder, constants.W_OK).catch((cause: unknown) => {
    throw new InvalidValueError(`${file} cannot be written: ${folder} is no folder that you may write to. Give another path.`, {
      subject,
      given: file,
      cause,
    });
  });
}
