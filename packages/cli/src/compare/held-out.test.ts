import { mkdir, writeFile } from 'node:fs/promises';
import { dirname, join } from 'node:path';

import { policies } from '@kv/policies';
import { InvalidValueError } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { needleModel, temporaryFile } from '../testing/run-kv.js';
import { readHeldOut } from './held-out.js';

const { signal } = new AbortController();

/** A model's folder with this file of right answers. */
async function folderWith(content: string): Promise<string> {
  const folder = dirname(await temporaryFile('config.json', '{}'));
  await mkdir(join(folder, 'eval'));
  await writeFile(join(folder, 'eval/right-answers.json'), content);
  return folder;
}

describe('readHeldOut', () => {
  it('knows the small model, whose methods answer the most with the setting that comes first', async () => {
    const heldOut = await readHeldOut(needleModel, signal);
    const names = policies.map(({ name }) => name);
    expect(names).toEqual(expect.arrayContaining(heldOut?.shares.map(({ policy }) => policy) ?? []));
    const best = new Map<string, number>();
    for (const { name, method } of policies) {
      const right = heldOut?.shares.find(({ policy }) => policy === name)?.right;
      if (right === undefined) continue;
      best.set(method, best.get(method) ?? right);
      expect({ name, right: right <= (best.get(method) ?? 0) }).toEqual({ name, right: true });
    }
    expect([...best.keys()]).toEqual(['dense', 'hbw', 'halo', 'hierasparse', 'int', 'halo+int', 'hcattn', 'skeleton', 'clustered', 'offload']);
  });

  it('knows nothing of a model that was not measured', async () => {
    expect(await readHeldOut(dirname(await temporaryFile('config.json', '{}')), signal)).toBeUndefined();
  });

  it.each(['{', '[]', '{ "tokens": [1], "shares": [{ "policy": "dense", "right": 101, "examples": 1 }] }'])('refuses %s', async (content) => {
    const reading = readHeldOut(await folderWith(content), signal);
    await expect(reading).rejects.toThrow(InvalidValueError);
    await expect(reading).rejects.toThrow('is no list of shares of right answers');
  });
});
