import { execFileSync } from 'node:child_process';
import { chmod, mkdir, mkdtemp, rm, symlink, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import { createDevice, KvError } from '@kv/sparse-core';
import { liveBytes } from '@kv/sparse-core/testing';
import { afterAll, expect, it } from 'vitest';

import { generate } from './generate/generate.js';
import { generateTokens } from './generate/generate-tokens.js';
import { Model } from './model.js';
import { mutations, Random } from './testing/hostile-files.js';
import type { HostileFiles, OddFile } from './testing/hostile-files.js';
import { largeTokenizer } from './testing/large-tokenizer.js';
import { randomModel } from './testing/random-model.js';
import { tokenizerLimits } from './tokenizer/tokenizer-limits.js';

/** KV_HOSTILE_FILES=100000 makes it longer; KV_HOSTILE_SEED=n another run. */
const tries = Number(process.env.KV_HOSTILE_FILES ?? 1000);
const seed = Number(process.env.KV_HOSTILE_SEED ?? 20_261_122);
const atOnce = 4;
const limitsOfProduct = { ...tokenizerLimits };
const limits = { milliseconds: 500, waitingFactor: 20, heapMegabytes: 128 };
/** Milliseconds: what three requests to a tokenizer's process may take by the clock, two new processes, and the rest. */
const longest = 6 * limits.waitingFactor * limits.milliseconds;

const json = {
  ...{ model_type: 'llama', vocab_size: 300, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 2 },
  ...{ num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64, rope_theta: 10_000 },
};
const { files: network } = randomModel(json, 2);
const tokenizer = {
  'tokenizer.json': JSON.stringify(largeTokenizer(299)),
  'tokenizer_config.json': JSON.stringify({ bos_token: '<|bos|>', chat_template: '{{ messages[0].content }}' }),
};
const device = createDevice({ threads: 1 });
const text = 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa';

async function writeOdd(path: string, { odd }: OddFile): Promise<void> {
  if (odd === 'directory') await mkdir(path);
  else if (odd === 'fifo') execFileSync('mkfifo', [path]);
  else if (odd === 'loop') await symlink(path, path);
  else if (odd === 'endless') await symlink('/dev/zero', path);
  else {
    await writeFile(path, '{}');
    await chmod(path, 0);
  }
}

async function withFiles<Result>(files: HostileFiles, use: (directory: string) => Promise<Result>): Promise<Result> {
  const directory = await mkdtemp(join(tmpdir(), 'kv-hostile-'));
  try {
    for (const [name, content] of Object.entries(files)) {
      const path = join(directory, name);
      if (typeof content === 'string' || content instanceof Uint8Array) await writeFile(path, content);
      else await writeOdd(path, content);
    }
    return await use(directory);
  } finally {
    await rm(directory, { recursive: true });
  }
}

/** Opens a model and uses all of it: what it says is of no interest, as long as it ends. */
async function use(directory: string, hasTokenizer: boolean): Promise<void> {
  using model = await Model.open(directory, { device });
  using runner = model.createRunner({ contextTokens: 64, maxBatchRows: 64 });
  for await (const { id } of generateTokens(runner, [1, 2, 3], { maxTokens: 3 })) expect(id).toBeGreaterThanOrEqual(0);
  if (!hasTokenizer) return;
  const prompt = await model.tokenizer.renderChat([{ role: 'user', content: text }]);
  for await (const token of generate(runner, model.tokenizer, prompt, { maxTokens: 3 })) expect(token.text).toBeTypeOf('string');
}

/** `works`, or the code of the error: nothing else is an outcome. */
async function outcomeOf(attempt: number): Promise<string> {
  const random = new Random(seed + attempt);
  const shares = mutations.flatMap((mutation) => Array.from({ length: mutation.share }, () => mutation));
  const { name, mutate } = random.of(shares);
  const hasTokenizer = /tokenizer|merges|expressions|templates/.test(name);
  const files: HostileFiles = { ...network, ...(hasTokenizer ? tokenizer : {}) };
  mutate(files, random);
  const started = performance.now();
  try {
    await withFiles(files, (directory) => use(directory, hasTokenizer));
    return 'works';
  } catch (error) {
    if (error instanceof KvError) return error.code;
    throw new Error(`try ${attempt} of seed ${seed} (${name}) ended in no KvError`, { cause: error });
  } finally {
    expect(performance.now() - started, `time of try ${attempt} (${name})`).toBeLessThan(longest);
  }
}

afterAll(() => {
  // Other files of tests run in this process.
  Object.assign(tokenizerLimits, limitsOfProduct);
});

it(
  `${tries} mutated model directories open and work, or fail with a KvError, in bounded time and memory`,
  async () => {
    Object.assign(tokenizerLimits, limits);
    const outcomes: Record<string, number> = {};
    let next = 0;
    const work = async (): Promise<void> => {
      while (next < tries) {
        const outcome = await outcomeOf(next++);
        outcomes[outcome] = (outcomes[outcome] ?? 0) + 1;
      }
    };
    await Promise.all(Array.from({ length: atOnce }, work));
    console.log('hostile model files:', outcomes);
    expect(await liveBytes(device, 0)).toBe(0);
    expect(process.memoryUsage().rss).toBeLessThan(2 * 2 ** 30);
    expect(Object.values(outcomes).reduce((sum, count) => sum + count, 0)).toBe(tries);
    // Both ends are met: mutations that leave a model usable, and ones that are found.
    expect(outcomes.works).toBeGreaterThan(tries / 50);
    expect(outcomes.KV_MODEL_FORMAT).toBeGreaterThan(tries / 3);
  },
  60_000 + 100 * tries,
);
