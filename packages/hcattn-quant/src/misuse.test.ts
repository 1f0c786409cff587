import { type Device, hostPool } from '@kv/sparse-core';
import {
  anyFinite,
  anyFloat,
  describeOnDeviceKinds,
  expectAllTried,
  freeAxis,
  legalAt,
  legalTogether,
  type MisusedFunction,
  misusedOperation,
  misusedStore,
  MisuseSuite,
  optional,
  otherEntries,
  Random,
  rowsApart,
} from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { placeCodebooks } from './codebooks/place-codebooks.js';
import * as hcattnQuant from './index.js';
import { codedKeyScores } from './operations/coded-key-scores.js';
import { copyValues } from './operations/copy-values.js';
import { decodeAttentionListed } from './operations/decode-attention-listed.js';
import { decodeAttentionQuantized } from './operations/decode-attention-quantized.js';
import { decodeKeys } from './operations/decode-keys.js';
import { dequantizeKv } from './operations/dequantize-kv.js';
import { encodeKeys } from './operations/encode-keys.js';
import { loadValues } from './operations/load-values.js';
import { quantizedKeyScores } from './operations/quantized-key-scores.js';
import { quantizeKv } from './operations/quantize-kv.js';
import { runningMeans } from './operations/running-means.js';
import { selectByMass } from './operations/select-by-mass.js';
import { weightedValues } from './operations/weighted-values.js';
import { trainCodebook } from './operations/train-codebook.js';
import { randomQuantizedCache } from './testing/random-quantized-cache.js';
import { scoredTokens } from './testing/scored-tokens.js';
import { randomCodebooks } from './testing/random-codebooks.js';
import { testBlocks } from './testing/test-blocks.js';

const blocks = (device: Device) => ({
  ...testBlocks(device, { dtype: 'f16', headDim: 32, blocks: 2, quantizedBlocks: 2, keyBits: 8, valueBits: 4 }),
  from: [0, 1],
  to: [1, 0],
});

const codesOfValues = (device: Device) => ({
  values: device.tensor('f32', ['block', 'blockToken', 'dim'], [2, 64, 32], new Float32Array(2 * 64 * 32)),
  hostValues: device.tensor('i8', ['valueBlock', 'blockToken', 'dim'], [2, 64, 32], new Int8Array(2 * 64 * 32).fill(3)),
  valueScales: device.tensor('bf16', ['valueBlock', 'blockToken'], [2, 64], new Uint16Array(2 * 64).fill(0x3f80)),
  from: [0, 1],
  to: [1, 0],
});

/** Two slots of one kv head, with one block and two, and rows of both. */
function rowsOfAnswers(device: Device) {
  const counts = { rows: [2, 1], blocks: [[1], [2]], kvHeads: 1, group: 2 };
  const cache = randomQuantizedCache(device, new Random(1), { ...counts, headDim: 64, keyBits: 8, valueBits: 4 });
  const numbers = Float32Array.from({ length: 3 * 2 * 64 }, (_, index) => Math.sin(index));
  const rows = () => device.tensor('f32', ['token', 'queryHead', 'dim'], [3, 2, 64], numbers);
  const logSumExp = device.tensor('f32', ['token', 'queryHead'], [3, 2], new Float32Array(6));
  return { query: rows(), output: rows(), logSumExp, ...cache.arguments, scale: 0.5 };
}

/** The same slots, of whose keys the rows get scores. */
function scoredRows(device: Device) {
  const counts = { rows: [2, 1], blocks: [[1], [2]], kvHeads: 1, group: 2 };
  const cache = randomQuantizedCache(device, new Random(1), { ...counts, headDim: 64, keyBits: 8, valueBits: 4 });
  const { quantizedKeys, quantizedValues, keyBits, blockTable, keyCounts, slots, queryStart } = cache.arguments;
  quantizedValues.dispose();
  const numbers = Float32Array.from({ length: 3 * 2 * 64 }, (_, index) => Math.sin(index));
  return {
    query: device.tensor('f32', ['token', 'queryHead', 'dim'], [3, 2, 64], numbers),
    scores: device.tensor('f32', ['token', 'queryHead', 'key'], [3, 2, 128], new Float32Array(768)),
    ...{ quantizedKeys, keyBits, blockTable, keyCounts, slots, queryStart, scale: 0.5, rotated: true },
  };
}

const copiedValues = (device: Device) => ({
  values: device.tensor('f16', ['block', 'blockToken', 'dim'], [2, 64, 8], new Uint16Array(1024)),
  hostValues: device.tensor('i8', ['valueBlock', 'blockToken', 'dim'], [2, 64, 8], new Int8Array(1024)),
  valueScales: device.tensor('bf16', ['valueBlock', 'blockToken'], [2, 64], new Uint16Array(128)),
  from: [0, 1],
  to: [1, 0],
});

const summedBlocks = (device: Device) => ({
  values: device.tensor('f16', ['block', 'blockToken', 'dim'], [2, 64, 8], new Uint16Array(1024)),
  sums: device.tensor('f32', ['valueBlock', 'dim'], [2, 8], new Float32Array(16)),
  means: device.tensor('f16', ['valueBlock', 'dim'], [2, 8], new Uint16Array(16)),
  from: [0, 1],
  to: [1, 0],
  before: [-1, 1],
  counts: [1, 2],
});

const scores = (device: Device) => ({
  ...scoredTokens(device, new Random(2), {
    rows: [1, 1],
    tokens: [[64], [100]],
    kvHeads: 1,
    group: 2,
    chosen: 30,
    score: (row, head, token) => Math.sin(row + head + token),
  }).arguments,
  denseLogSumExp: device.tensor('f32', ['token', 'queryHead'], [3, 2], new Float32Array(6)),
  ranges: device.tensor('f32', ['token', 'queryHead', 'part', 'bound'], [3, 2, 1, 2], new Float32Array(12).map((_, i) => (i % 2) * 2 - 1)),
  tau: 0.9,
  missingMass: 'paper' as const,
});

/** Lists, in the device's memory, which a CPU sums as well. */
const listedRows = (device: Device) => ({
  valueRows: device.tensor('i32', ['token', 'kvHead', 'chosen'], [2, 2, 3], new Int32Array(12)),
  counts: device.tensor('i32', ['token', 'kvHead'], [2, 2], new Int32Array(4)),
  output: device.tensor('f32', ['token', 'queryHead', 'dim'], [2, 4, 8], new Float32Array(64)),
});

const listedValues = (device: Device) => ({
  ...listedRows(device),
  weights: device.tensor('f32', ['token', 'kvHead', 'chosen', 'groupHead'], [2, 2, 3, 2], new Float32Array(24)),
  values: device.tensor('f16', ['valueBlock', 'blockToken', 'dim'], [2, 64, 8], new Uint16Array(1024)),
});

const listedKeys = (device: Device) => ({
  ...listedRows(device),
  query: device.tensor('f32', ['token', 'queryHead', 'dim'], [2, 4, 8], new Float32Array(64).fill(1)),
  keys: device.tensor('f32', ['valueBlock', 'blockToken', 'dim'], [2, 64, 8], new Float32Array(1024)),
  values: device.tensor('i8', ['valueBlock', 'blockToken', 'dim'], [2, 64, 8], new Int8Array(1024)),
  valueScales: device.tensor('bf16', ['valueBlock', 'blockToken'], [2, 64], new Uint16Array(128)),
  logSumExp: device.tensor('f32', ['token', 'queryHead'], [2, 4], new Float32Array(8)),
  scale: 0.5,
});

/** Two kv heads of 16 dims, with an index without levels. */
const coded = (device: Device) => ({
  codedKeys: device.tensor('u8', ['codedBlock', 'byte'], [2, 264], new Uint8Array(528)),
  centroids: device.tensor('f16', ['kvHead', 'book', 'centroid', 'subDim'], [2, 1, 16, 2], new Random(3).elements('f16', 64)),
  channelScale: device.tensor('f32', ['kvHead', 'dim'], [2, 16], new Float32Array(32).fill(2)),
  codeBits: 4,
});

const codedBlocks = (device: Device) => ({
  ...coded(device),
  keys: device.tensor('f32', ['block', 'blockToken', 'dim'], [2, 64, 16], new Float32Array(2 * 64 * 16)),
  from: [0, 1],
  to: [1, 0],
  kvHeads: [1, 0],
});

const encodedBlocks = (device: Device) => ({
  ...codedBlocks(device),
  index: device.tensor('u8', ['kvHead', 'book', 'byte'], [2, 1, 48 + 64 + 32 + 512], new Uint8Array(2 * 656)),
});

const scoredBlocks = (device: Device) => ({
  ...coded(device),
  query: device.tensor('f32', ['token', 'queryHead', 'dim'], [2, 4, 16], new Float32Array(128)),
  scores: device.tensor('f32', ['token', 'queryHead', 'key'], [2, 4, 64], new Float32Array(512)),
  blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [2, 2, 1], Int32Array.of(0, 1, 1, 0)),
  keyCounts: device.tensor('i32', ['slot', 'kvHead'], [2, 2], Int32Array.of(64, 64, 64, 0)),
  slots: device.tensor('i32', ['batch'], [2], Int32Array.of(1, 0)),
  queryStart: device.tensor('i32', ['boundary'], [3], Int32Array.of(0, 1, 2)),
  ranges: device.tensor('f32', ['token', 'queryHead', 'part', 'bound'], [2, 4, 3, 2], new Float32Array(48)),
  scale: 0.25,
});

/** What codebooks of two heads, of two groups each, are trained with. */
function codebooksToTrain(device: Device) {
  const axes = ['kvHead', 'book', 'centroid', 'subDim'] as const;
  const keys = Float32Array.from({ length: 2 * 40 * 4 }, (_, index) => Math.sin(index));
  return {
    keys: device.tensor('f32', ['kvHead', 'token', 'dim'], [2, 40, 4], keys),
    scale: device.tensor('f32', ['kvHead', 'dim'], [2, 4], new Float32Array(8)),
    means: device.tensor('f32', axes, [2, 1, 5, 2], new Float32Array(20)),
    rounded: device.tensor('f16', axes, [2, 1, 5, 2], new Uint16Array(20)),
    counts: device.tensor('i32', ['kvHead', 'book', 'centroid'], [2, 1, 5], new Int32Array(10)),
    ...{ channelScale: false, seed: 1, batchVectors: 20, firstIteration: 0, iterations: 2 },
  };
}

const functions: readonly MisusedFunction[] = [
  misusedOperation(quantizeKv, blocks, { outputs: ['quantizedKeys', 'quantizedValues'], legal: [] }),
  misusedOperation(decodeAttentionQuantized, rowsOfAnswers, {
    outputs: ['output', 'logSumExp'],
    legal: [optional('logSumExp'), freeAxis('blockTable', 'block'), anyFinite('scale'), anyFloat('query|output'), rowsApart('query|output'), ...otherEntries],
  }),
  misusedOperation(encodeKeys, encodedBlocks, {
    outputs: ['codedKeys'],
    legal: [optional('channelScale'), freeAxis('codedKeys', 'codedBlock'), freeAxis('keys', 'block'), anyFloat('keys'), rowsApart('keys')],
  }),
  misusedOperation(decodeKeys, codedBlocks, {
    outputs: ['keys'],
    legal: [
      optional('channelScale'),
      freeAxis('codedKeys', 'codedBlock'),
      freeAxis('centroids', 'centroid'),
      freeAxis('keys', 'block'),
      anyFloat('keys'),
      rowsApart('keys'),
    ],
  }),
  misusedOperation(codedKeyScores, scoredBlocks, {
    outputs: ['scores', 'ranges'],
    legal: [
      optional('channelScale|ranges'),
      freeAxis('codedKeys', 'codedBlock'),
      freeAxis('centroids', 'centroid'),
      freeAxis('scores', 'key'),
      freeAxis('ranges', 'part'),
      anyFinite('scale'),
      anyFloat('query'),
      rowsApart('query|scores'),
    ],
  }),
  misusedOperation(quantizedKeyScores, scoredRows, {
    outputs: ['scores'],
    legal: [
      optional('rotated'),
      legalAt('query', 'dim = 63', 'blocks fill up the last group of a head'),
      freeAxis('quantizedKeys', 'quantizedBlock'),
      freeAxis('scores', 'key'),
      anyFinite('scale'),
      anyFloat('query'),
      rowsApart('query|scores'),
    ],
  }),
  misusedOperation(dequantizeKv, blocks, { outputs: ['keys', 'values'], legal: [] }),
  misusedOperation(loadValues, codesOfValues, {
    outputs: ['values'],
    legal: [
      anyFloat('values'),
      freeAxis('values', 'block'),
      rowsApart('values'),
      legalTogether('args\\.(hostValues|valueScales)', 'f32|bf16|f16|absent|undefined', 'values without scales'),
    ],
  }),
  misusedOperation(copyValues, copiedValues, {
    outputs: ['hostValues', 'valueScales'],
    legal: [anyFloat('values'), legalAt('values', 'f32', 'any float dtype'), freeAxis('values', 'block'), rowsApart('values')],
  }),
  misusedOperation(runningMeans, summedBlocks, {
    outputs: ['sums', 'means'],
    legal: [freeAxis('values', 'block'), freeAxis('means', 'valueBlock'), rowsApart('values'), legalAt('before\\.\\d', '-1', 'a sum of its own')],
  }),
  misusedOperation(selectByMass, scores, {
    outputs: ['valueRows', 'weights', 'counts', 'logSumExp'],
    legal: [
      optional('denseLogSumExp|missingMass|weights|ranges'),
      legalTogether('args\\.(valueRows|weights)', 'chosen = \\d+|absent|undefined', 'without weights no other tensor has this axis'),
      freeAxis('scores', 'key'),
      freeAxis('blockTable', 'block'),
      freeAxis('ranges', 'part'),
      legalAt('tau', '0\\.5', 'a share'),
    ],
  }),
  misusedOperation(weightedValues, listedValues, {
    outputs: ['output'],
    legal: [legalAt('values', 'f32|bf16|i8', 'any dtype of values'), freeAxis('values', 'valueBlock')],
  }),
  misusedOperation(decodeAttentionListed, listedKeys, {
    outputs: ['output', 'logSumExp'],
    legal: [anyFloat('query|keys'), anyFinite('scale'), rowsApart('query'), freeAxis('valueRows', 'chosen'), legalTogether('args\\.(values|valueScales)', 'f32|bf16|f16|absent|undefined', 'values without scales')],
  }),
  misusedOperation(trainCodebook, codebooksToTrain, {
    outputs: ['scale', 'means', 'rounded', 'counts'],
    legal: [
      anyFloat('keys'),
      rowsApart('keys'),
      freeAxis('keys', 'token'),
      legalAt('seed|batchVectors|firstIteration|iterations', '\\d{1,16}', 'any count'),
    ],
  }),
];

const options: readonly MisusedFunction[] = [
  {
    name: 'hcAttentionStore',
    args: () => ({ options: { keys: 'int8', values: 'int4', valuesOn: 'device', sinkTokens: 64, localWindow: 128, dtype: 'f16' } }),
    call: ({ options: given }: { options: never }) => void hcattnQuant.hcAttentionStore(given),
    legal: [
      optional('options\\.(sinkTokens|localWindow|dtype)'),
      legalAt('options\\.(sinkTokens|localWindow)', '\\d{10}', 'more than there are is all'),
    ],
  },
];

const prefills: readonly MisusedFunction[] = [
  {
    name: 'hcAttentionPrefill',
    args: () => ({ options: { blockTokens: 128 } }),
    call: ({ options: given }: { options: never }) => void hcattnQuant.hcAttentionPrefill(given),
    legal: [
      optional('options|options\\.blockTokens'),
      legalAt('options', 'an object without prototype|an empty array', 'all has defaults'),
      legalAt('options\\.blockTokens', '\\d{10}', 'other multiples of 64'),
    ],
  },
];

const stores = misusedStore(
  () => hcattnQuant.hcAttentionStore({ keys: 'int8', values: 'int4', valuesOn: 'device', localWindow: 0 }),
  'attend',
  'finishPrefill',
);

const untried = {
  Calibration: 'takes nothing',
  'Calibration.train': 'codebooks/calibration.test.ts',
  'Calibration.expectTrainable': 'refuses what train refuses: codebooks/calibration.test.ts',
  quantizedBlockBytes: 'arithmetic of numbers',
  codedBlockBytes: 'arithmetic of numbers',
  centroidIndexBytes: 'arithmetic of numbers',
  indexCentroids: 'takes tensors that are made asynchronously: index-centroids.test.ts',
  placeCodebooks: 'is asynchronous, and checks codebooks as loadCodebooks does: place-codebooks.test.ts',
  hcAttentionHostBytes: 'checks its options as hcAttentionStore does: hc-attention-coded.test.ts',
  codeBitsOf: 'arithmetic of numbers',
  loadCodebooks: 'reads any file: codebooks-file.test.ts',
  saveCodebooks: 'writes any file: codebooks-file.test.ts',
};

it('covers every export', () => {
  expectAllTried(hcattnQuant, [...functions, ...options, ...prefills], untried);
});

describeOnDeviceKinds('misuse', ({ name, open }) => {
  const device = open();
  const suite = new MisuseSuite(device);

  // The tensors of `listedValues` and `listedKeys` are in the memory of the device, and codebooks are trained on CPU devices alone.
  const onCpuAlone = ['weightedValues', 'decodeAttentionListed', 'trainCodebook'];
  const operations = functions.filter((subject) => name !== 'cuda' || !onCpuAlone.includes(subject.name));
  it.each([...operations, ...options, ...prefills, ...stores])('of $name ends in a typed error, and changes nothing', async (subject) => {
    await suite.misuse(subject);
  });

  it('of stores of codes and values on the host ends in typed errors, and changes nothing', async () => {
    const books = randomCodebooks(new Random(1), { layers: 1, kvHeads: 1, headDim: 64, groups: 16, centroids: 16 });
    using keys = await placeCodebooks(device, books);
    // Disposed stores give their memory back a little later.
    using pool = await hostPool(device, { bytes: 2 ** 24 });
    const settings = { keys, valuesOn: 'host', values: 'f16', hostPool: pool, localWindow: 0 } as const;
    const given = { ...settings, tau: 0.7, missingMass: 'paper', maxTokens: 100, sinkTokens: 64, dtype: 'f16', hostKeys: false } as const;
    await suite.misuse({
      name: 'hcAttentionStore with codebooks',
      args: () => ({ options: given }),
      call: ({ options: changed }: { options: never }) => void hcattnQuant.hcAttentionStore(changed),
      lasting: ['options.keys', 'options.hostPool'],
      legal: [
        optional('options\\.(values|hostKeys|hostPool|localWindow|tau|missingMass|maxTokens|sinkTokens|dtype)'),
        legalAt('options\\.tau', '0\\.5', 'another share'),
        legalAt('options\\.(sinkTokens|localWindow|maxTokens)', '\\d{10}', 'more than there are is all'),
      ],
    });
    for (const subject of misusedStore(() => hcattnQuant.hcAttentionStore(settings), 'attend', 'finishPrefill')) await suite.misuse(subject);
  });

  it('is counted', () => {
    expect(suite.counts.tries).toBeGreaterThan(500);
    console.log(`misuse of hcattn-quant on ${name}: ${String(suite.counts)}`);
  });
});
