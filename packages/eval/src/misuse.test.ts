import { mkdtempSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';

import { Model } from '@kv/model';
import { createDevice } from '@kv/sparse-core';
import { aProxiedSignal, expectAllTried, legalAt, legalTogether, type LegalValue, type MisusedFunction, MisuseSuite, optional } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import * as exported from './index.js';
import { smallModelFile } from './testing/small-model.js';

const device = createDevice({ threads: 1 });
const model = await Model.open(smallModelFile(''), { device });
const runner = model.createRunner({ sequences: 4, contextTokens: 64 });
const { tokenizer } = model;
const lasting = ['runner', 'tokenizer'];

const directory = mkdtempSync(join(tmpdir(), 'kv-eval-misuse-'));
function fileOf(name: string, row: object): string {
  const path = join(directory, name);
  writeFileSync(path, gzipSync(JSON.stringify(row)));
  return path;
}
const example = { id: 'one', task: 'recall', length: 8, prompt: 'The key is 7.\nKey?', answer: ' 7' };
const files = { texts: fileOf('texts', { text: 'a text' }), examples: fileOf('examples', example) };
const encoded = await exported.encodeExample(tokenizer, example);

const withoutFields = legalAt('options', 'an empty array|an object without prototype', 'no option is given');
const anyNumber = (paths: string) => legalAt(paths, '-?[\\d.e+]+', 'any finite number');
const anyText = (paths: string) => legalAt(paths, "'.*'", 'any text');
const anyIterable = (paths: string) => legalAt(paths, "one entry (more|fewer)|an empty array", 'any positions');

/** A function of some arguments, in the order in which they are named. */
function tried(name: string, call: (...given: never[]) => unknown, args: () => object, legal: readonly LegalValue[] = []): MisusedFunction {
  const names = Object.keys(args());
  return {
    name,
    args: () => ({ ...args() }),
    call: (given: Record<string, unknown>) => {
      const result = call(...(names.map((each) => given[each]) as never[]));
      return result instanceof Promise ? result.then(() => undefined) : undefined;
    },
    legal,
    lasting,
  };
}

const head = { keys: Float32Array.of(1, 2, 3, 4), values: Float32Array.of(5, 6, 7, 8), headDim: 2 };
const weights = [0.5, 0.25, 0.25];
const longer = [
  legalAt('tokens', '\\d{10,16}', 'a text of any length'),
  legalTogether('tokens|kept\\.\\d', '\\d{10,16}', 'positions of a longer text'),
];
const spread = [optional('bins'), anyIterable('kept'), ...longer];
const vectors = () => ({ output: [1, 2], reference: [3, 4] });

const functions: readonly MisusedFunction[] = [
  tried('attentionWeights', exported.attentionWeights, () => ({ query: Float32Array.of(1, 2), cache: { ...head }, scale: 0.5 }), [anyNumber('scale')]),
  tried('attentionOutput', exported.attentionOutput, () => ({ weights: [0.5, 0.5], cache: { ...head }, kept: [0, 1] }), [
    optional('kept'),
    anyIterable('kept'),
    anyNumber('weights\\.\\d'),
  ]),
  tried('indexEntropy', exported.indexEntropy, () => ({ kept: [0, 1], tokens: 4, bins: 2 }), spread),
  tried('indexCoverage', exported.indexCoverage, () => ({ kept: [0, 1], tokens: 4, bins: 2 }), spread),
  tried('indexGini', exported.indexGini, () => ({ kept: [0, 1], tokens: 4, bins: 2 }), spread),
  tried('largestGap', exported.largestGap, () => ({ kept: [0, 1], tokens: 4 }), [anyIterable('kept'), ...longer]),
  tried('capturedMass', exported.capturedMass, () => ({ weights: [...weights], kept: [0, 2] }), [anyNumber('weights\\.\\d'), anyIterable('weights|kept')]),
  tried('massEfficiency', exported.massEfficiency, () => ({ weights: [...weights], kept: [0, 2] }), [anyNumber('weights\\.\\d'), anyIterable('weights|kept')]),
  tried('topRecall', exported.topRecall, () => ({ weights: [...weights], kept: [0, 2], k: 2 }), [
    anyNumber('weights\\.\\d'),
    anyIterable('weights|kept'),
    legalAt('k', '\\d{10,16}', 'all of them'),
  ]),
  tried('klDivergence', exported.klDivergence, () => ({ weights: [...weights], approximate: [...weights] }), [
    anyNumber('(weights|approximate)\\.\\d'),
    anyIterable('weights|approximate'),
  ]),
  tried('relativeError', exported.relativeError, vectors, [anyNumber('\\w+\\.\\d')]),
  tried('cosineSimilarity', exported.cosineSimilarity, vectors, [anyNumber('\\w+\\.\\d')]),
  tried('centredError', exported.centredError, () => ({ ...vectors(), meanValue: [0, 1] }), [anyNumber('\\w+\\.\\d')]),
  tried('centredLogitError', exported.centredLogitError, vectors, [anyNumber('\\w+\\.\\d')]),
  tried(
    'selectionFidelity',
    exported.selectionFidelity,
    () => ({ trial: { cache: { ...head }, heldOutQueries: [Float32Array.of(1, 2)], kept: [0, 1], scale: 0.5, topTokens: 1 } }),
    [
      optional('trial\\.topTokens'),
      anyNumber('trial\\.scale'),
      legalAt('trial\\.topTokens', '\\d{10,16}', 'all of them'),
      legalAt('trial\\.heldOutQueries', 'one entry more', 'any number of queries'),
      legalAt('trial\\.kept', 'one entry fewer', 'any of them'),
    ],
  ),
  tried('observing', exported.observing, () => ({ observationWindow: 4 }), [legalAt('observationWindow', '\\d{10,16}', 'any number of queries')]),
  tried('readTexts', exported.readTexts, () => ({ file: files.texts })),
  tried('readRetrievalExamples', exported.readRetrievalExamples, () => ({ file: files.examples })),
  tried('encodeExample', exported.encodeExample, () => ({ tokenizer, example: { ...example } }), [
    anyText('example\\.(id|task)'),
    legalAt('example\\.length', '\\d{10,16}', 'it is only handed on'),
    legalAt('example\\.answer', "'\\w+'", 'any text'),
  ]),
  tried(
    'textLoss',
    exported.textLoss,
    () => ({
      runner,
      ids: Int32Array.of(5, 6, 7, 8),
      options: { contextTokens: 2, chunkTokens: 1, select: exported.observing(0), signal: new AbortController().signal },
    }),
    [
      optional('options|options\\.\\w+'),
      withoutFields,
      aProxiedSignal('options\\.signal'),
      anyText('options\\.select\\.name'),
    ],
  ),
  tried(
    'evaluateRetrieval',
    exported.evaluateRetrieval,
    () => ({
      runner,
      example: { ...encoded },
      policies: [{ name: 'all', select: () => undefined }],
      options: { moments: ['question-aware'], divergence: true, signal: new AbortController().signal },
    }),
    [
      optional('options|options\\.\\w+'),
      withoutFields,
      aProxiedSignal('options\\.signal'),
      legalAt('policies|options\\.moments', 'one entry (more|fewer)', 'any number of them'),
      anyText('policies\\.0\\.name'),
      legalAt('example\\.(id|task|length)', '.*', 'it is only handed on'),
    ],
  ),
  tried(
    'evaluateBudgets',
    exported.evaluateBudgets,
    () => ({ runner, example: { ...encoded }, budgets: [], options: { signal: new AbortController().signal } }),
    [
      optional('options|options\\.\\w+'),
      withoutFields,
      aProxiedSignal('options\\.signal'),
      legalAt('example\\.(id|task|length)', '.*', 'it is only handed on'),
    ],
  ),
  tried(
    'summariseRetrieval',
    exported.summariseRetrieval,
    () => ({ results: [{ right: true, kvBytes: 8 }], keyOf: () => 'all' }),
    [
      legalAt('results', 'one entry (more|fewer)', 'any number of results'),
      anyNumber('results\\.0\\.kvBytes'),
      legalAt('keyOf', 'a function', 'any key'),
    ],
  ),
];

it('covers every export', () => {
  expectAllTried(exported, functions, {});
});

const suite = new MisuseSuite(device);

it.each(functions)('misuse of $name ends in a typed error, and changes nothing', async (subject) => {
  await suite.misuse(subject);
});

it('is counted', () => {
  expect(suite.counts.tries).toBeGreaterThan(100);
  console.log(`misuse of eval: ${String(suite.counts)}`);
});
