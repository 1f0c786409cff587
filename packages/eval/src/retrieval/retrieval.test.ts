import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';

import { InvalidValueError } from '@kv/sparse-core';
import type { KvSelector } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { smallModelFile, withSmallModel } from '../testing/small-model.js';
import { evaluateRetrieval } from './evaluate-retrieval.js';
import type { RetrievalResult, SelectionPolicy } from './evaluate-retrieval.js';
import { encodeExample, readRetrievalExamples } from './examples.js';
import { summariseRetrieval } from './summarise-retrieval.js';

const examples = await readRetrievalExamples(smallModelFile('eval/eval.jsonl.gz'));
const lastOfEachTask = [...new Map(examples.map((example) => [example.task, example])).values()];

/** Keeps the first and the last tokens of what a slot holds. */
function ends(first: number, last: number, seen: (held: number) => void = () => undefined): KvSelector {
  return {
    name: 'ends',
    observationWindow: 32,
    select(stream, { store, slot, lastQueries }) {
      const [held = 0] = store.lengths(slot);
      expect(lastQueries.shape[0]).toBe(32);
      seen(held);
      const kept = Array.from({ length: held }, (_, token) => token).filter((token) => token < first || token >= held - last);
      const rows = Int32Array.from([...kept, ...kept]);
      const indices = stream.device.tensor('i32', ['kvHead', 'kept'], [2, kept.length], rows);
      return { indices, counts: [kept.length, kept.length] };
    },
  };
}

describe('the examples', () => {
  it('are seven tasks of four lengths, whose questions are their last lines', () =>
    withSmallModel({ contextTokens: 64 }, async (_runner, { tokenizer }) => {
      expect(examples).toHaveLength(7 * 4 * 40);
      expect(lastOfEachTask).toHaveLength(7);
      for (const example of lastOfEachTask) {
        const { prompt, documentTokens, answer } = await encodeExample(tokenizer, example);
        const question = tokenizer.decode([...prompt.subarray(documentTokens)]);
        expect(example.prompt.endsWith(question)).toBe(true);
        expect(question.trim()).toMatch(/^(What is|What are|Value of|trace)[^\n]*$/);
        expect(tokenizer.decode([...answer])).toBe(example.answer);
      }
    }));

  it('are refused when they are none', async () => {
    const folder = await mkdtemp(join(tmpdir(), 'kv-eval-'));
    const file = join(folder, 'wrong.jsonl.gz');
    await writeFile(file, gzipSync(`${JSON.stringify(examples[0])}\n{"id":"x","task":"y"}\n`));
    await expect(readRetrievalExamples(file)).rejects.toThrow(/line 2/);
    await expect(readRetrievalExamples(file)).rejects.toThrow(InvalidValueError);
    await rm(folder, { recursive: true });
    await withSmallModel({ contextTokens: 64 }, async (_runner, { tokenizer }) => {
      const line = { id: 'line', task: 'none', length: 64, prompt: 'What is the pass key?', answer: ' 1' };
      await expect(encodeExample(tokenizer, line)).rejects.toThrow(InvalidValueError);
    });
  });
});

describe('evaluateRetrieval', () => {
  it('asks before and after the question is known, of a document that is read once', () =>
    withSmallModel({ sequences: 3, contextTokens: 1100 }, async (runner, { tokenizer }) => {
      const held: number[] = [];
      const policies: SelectionPolicy[] = [
        { name: 'everything', select: () => undefined },
        { name: 'all, selected', select: (tokens) => ends(tokens, 0) },
        { name: 'ends', select: (tokens) => ends(4, Math.floor(tokens / 16), (count) => held.push(count)) },
      ];
      const found: RetrievalResult[] = [];
      for (const task of ['needle4', 'multiquery3of8', 'needle24hex']) {
        for (const example of examples.filter((each) => each.task === task && each.length === 1024).slice(0, 3)) {
          const encoded = await encodeExample(tokenizer, example);
          found.push(...(await evaluateRetrieval(runner, encoded, policies)));
          expect(held.splice(0)).toEqual([
            ...new Array<number>(8).fill(encoded.prompt.length),
            ...new Array<number>(8).fill(encoded.documentTokens),
          ]);
          expect(runner.kvBytes.device).toBe(0);
        }
      }
      const scores = summariseRetrieval(found, ({ policy, moment }) => `${policy}, ${moment}`);
      expect([...scores.keys()]).toHaveLength(6);
      for (const moment of ['question-aware', 'question-agnostic']) {
        const [all, selected, some] = policies.map(({ name }) => scores.get(`${name}, ${moment}`));
        // The model answers all of these with a whole cache, and hardly any with a sixteenth that holds no fact.
        expect(all).toMatchObject({ examples: 9, right: 9, share: 1 });
        expect(selected).toEqual(all);
        expect(some?.right).toBeLessThanOrEqual(1);
        // 16 blocks of 1K tokens and 2 of the kept ones, in each head.
        expect((some?.kvBytes ?? 0) / (all?.kvBytes ?? 0)).toBeCloseTo(2 / 16, 2);
      }
    }));

  it('says how far the logits of a smaller cache are from those of the whole one', () =>
    withSmallModel({ sequences: 3, contextTokens: 1100 }, async (runner, { tokenizer }) => {
      const example = examples.find(({ id }) => id === 'needle4-1024-0');
      if (example === undefined) throw new Error('an example was expected');
      const encoded = await encodeExample(tokenizer, example);
      const policies: SelectionPolicy[] = [
        { name: 'everything', select: () => undefined },
        { name: 'ends', select: () => ends(4, 60) },
      ];
      const results = await evaluateRetrieval(runner, encoded, policies, { divergence: true });
      const [all, few, later, fewLater] = results.map(({ divergence }) => divergence ?? NaN);
      // The very same steps, and then the question in one chunk: f32 sums in another order, which move logits by 1e-3.
      expect(all).toBe(0);
      expect(later).toBeLessThan(1e-5);
      // A cache without the fact gives each digit about a tenth where the whole one is sure of it.
      expect(few).toBeGreaterThan(1);
      expect(fewLater).toBeGreaterThan(1);
      expect(runner.kvBytes.device).toBe(0);
      const [verdict] = await evaluateRetrieval(runner, encoded, policies, { moments: ['question-aware'] });
      expect(verdict?.divergence).toBeUndefined();
    }));

  it('says what greedy decoding says', () =>
    withSmallModel({ sequences: 3, contextTokens: 1100 }, async (runner, { tokenizer }) => {
      const example = examples.find(({ id }) => id === 'needle4-1024-0');
      if (example === undefined) throw new Error('an example was expected');
      const encoded = await encodeExample(tokenizer, example);
      const wrong = { ...encoded, answer: encoded.answer.with(-1, (encoded.answer.at(-1) ?? 0) + 1) };
      const policies = [{ name: 'everything', select: () => undefined }];
      const moments = ['question-aware'] as const;
      expect(await evaluateRetrieval(runner, encoded, policies, { moments })).toMatchObject([{ right: true }]);
      expect(await evaluateRetrieval(runner, wrong, policies, { moments })).toMatchObject([{ right: false }]);
      const signal = AbortSignal.abort(new Error('enough'));
      await expect(evaluateRetrieval(runner, encoded, policies, { signal })).rejects.toThrow('enough');
      expect(runner.kvBytes.device).toBe(0);
    }));
});
