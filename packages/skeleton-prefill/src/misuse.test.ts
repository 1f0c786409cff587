import type { Device } from '@kv/sparse-core';
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
  MisuseSuite,
  optional,
  pagedWaves,
  rowsApart,
  waves,
} from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { antidiagonalPrefill } from './antidiagonal-prefill.js';
import { clusteredPrefill } from './clustered-prefill.js';
import * as skeleton from './index.js';
import { antidiagonalBlockScores } from './operations/antidiagonal-block-scores.js';
import { clusteredBlockScores } from './operations/clustered-block-scores.js';
import { decomposeAttention, decompositionStateBytes } from './operations/decompose-attention.js';
import { pooledBlockScores } from './operations/pooled-block-scores.js';
import { selectKeyBlocks } from './operations/select-key-blocks.js';
import { verticalSlashBlockScores } from './operations/vertical-slash-block-scores.js';
import { pooledPrefill } from './pooled-prefill.js';
import { skeletonPrefill } from './skeleton-prefill.js';
import { streamingPrefill } from './streaming-prefill.js';
import { verticalSlashPrefill } from './vertical-slash-prefill.js';

const sizes = { slots: 2, kvHeads: 2, width: 3, blockTokens: 16, dim: 8, tokens: 40 };
const { kvHeads, dim, tokens } = sizes;
const rows = 6;

/** Rows of one sequence, and its keys. */
function attending(device: Device) {
  return {
    query: waves(device, ['token', 'queryHead', 'dim'], [rows, 4, dim]),
    blocks: pagedWaves(device, sizes),
    slots: device.tensor('i32', ['batch'], [1], Int32Array.of(1)),
    queryStart: device.tensor('i32', ['boundary'], [2], Int32Array.of(0, rows)),
    scale: 0.5,
  };
}

function scored(device: Device) {
  const scores = device.tensor('f32', ['queryHead', 'queryTile', 'keyBlock'], [4, 1, 1], new Float32Array(4));
  return { ...attending(device), scores };
}

function decomposed(device: Device) {
  const bytes = decompositionStateBytes({ queryHeads: 4, kvHeads, headDim: dim, pairs: 3 });
  return {
    ...attending(device),
    inverseFrequencies: device.tensor('f32', ['pair'], [3], Float32Array.of(1, 0.1, 0.01)),
    convention: 'halfSplit',
    attentionScale: 1,
    state: device.tensor('u8', ['byte'], [bytes], new Uint8Array(bytes)),
    seenTokens: 0,
    slash: device.tensor('f32', ['queryHead', 'lag'], [4, tokens], new Float32Array(4 * tokens)),
    vertical: device.tensor('f32', ['queryHead', 'key'], [4, tokens], new Float32Array(4 * tokens)),
    horizontal: device.tensor('f32', ['queryHead', 'row'], [4, rows], new Float32Array(4 * rows)),
    sinkTokens: 1,
    diagonalTokens: 4,
    samples: 50,
    seed: 3,
    ridge: 1e-3,
    formulas: 'corrected',
  };
}

const lists = (device: Device) => ({
  keyBlocks: device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], [2, 2, 5], new Int32Array(20)),
  keyBlockCounts: device.tensor('i32', ['queryHead', 'queryTile'], [2, 2], new Int32Array(4)),
  tileRows: 128,
  denseRows: 0,
  sinkTokens: 1,
  diagonalTokens: 4,
});

function selected(device: Device) {
  return {
    slash: waves(device, ['queryHead', 'lag'], [2, 300]),
    vertical: waves(device, ['queryHead', 'key'], [2, 300]),
    horizontal: waves(device, ['queryHead', 'row'], [2, 200]),
    ...lists(device),
    threshold: { budget: 0.5 },
    slashBound: 'safe',
  };
}

/** The same with scores of blocks in place of the three parts. */
function selectedByScores(device: Device) {
  const scores = waves(device, ['queryHead', 'queryTile', 'keyBlock'], [2, 2, 5]);
  return { scores, tokens: 300, rows: 200, ...lists(device), threshold: { mass: 0.9 } };
}

/** The same with as many blocks as another tile has. */
function selectedLikeATile(device: Device) {
  const tileBlocks = device.tensor('i32', ['queryHead', 'queryTile'], [2, 1], Int32Array.of(2, 3));
  return { ...selected(device), threshold: { tileBlocks } };
}

const legalRows = [
  anyFloat('query'),
  freeAxis('query', 'token'),
  rowsApart('query'),
  freeAxis('blocks.blockTable', 'block'),
  legalAt('slots', 'gaps within rows', 'it has one element'),
];

const legalScores = [...legalRows, anyFinite('scale'), legalAt('scores', 'over args\\.slots, shifted', 'behind its one element')];

const strided = (device: Device) => ({ ...scored(device), stride: 8 });

const operations: readonly MisusedFunction[] = [
  misusedOperation(antidiagonalBlockScores, strided, { outputs: ['scores'], legal: [...legalScores, optional('stride')] }),
  misusedOperation(clusteredBlockScores, scored, { outputs: ['scores'], legal: legalScores }),
  misusedOperation(pooledBlockScores, scored, { outputs: ['scores'], legal: legalScores }),
  misusedOperation(verticalSlashBlockScores, scored, { outputs: ['scores'], legal: legalScores }),
  misusedOperation(decomposeAttention, decomposed, {
    outputs: ['state', 'slash', 'vertical', 'horizontal'],
    legal: [
      ...legalRows,
      anyFinite('scale|attentionScale'),
      legalAt('seed', '\\d+', 'any whole number up to 2^53'),
      legalAt('ridge', '0\\.5', 'a share'),
      legalAt('slash|vertical|horizontal', 'over args\\.slots, shifted', 'behind its one element'),
      optional('attentionScale|sinkTokens|diagonalTokens|samples|seed|ridge|formulas'),
    ],
  }),
  misusedOperation(selectKeyBlocks, selected, {
    outputs: ['keyBlocks', 'keyBlockCounts'],
    legal: [
      freeAxis('keyBlocks', 'listedBlock'),
      freeAxis('horizontal', 'row'),
      legalTogether('args\\.(slash|vertical)', '(lag|key) = 299', 'another number of tokens'),
      legalAt('threshold\\.budget', '0\\.5', 'a share'),
      optional('tileRows|denseRows|slashBound|sinkTokens|diagonalTokens'),
      legalAt('denseRows|diagonalTokens', '2147483647', 'more than there are is all'),
    ],
  }),
  misusedOperation(selectKeyBlocks, selectedLikeATile, {
    outputs: ['keyBlocks', 'keyBlockCounts'],
    legal: [
      freeAxis('keyBlocks', 'listedBlock'),
      freeAxis('horizontal', 'row'),
      rowsApart('threshold.tileBlocks'),
      legalAt('threshold\\.tileBlocks', 'gaps within rows', 'they have one element'),
      legalTogether('args\\.(slash|vertical)', '(lag|key) = 299', 'another number of tokens'),
      optional('tileRows|denseRows|slashBound|sinkTokens|diagonalTokens'),
      legalAt('denseRows|diagonalTokens', '2147483647', 'more than there are is all'),
    ],
  }),
  misusedOperation(selectKeyBlocks, selectedByScores, {
    outputs: ['keyBlocks', 'keyBlockCounts'],
    legal: [
      freeAxis('keyBlocks', 'listedBlock'),
      legalAt('threshold\\.mass', '0\\.5', 'a share'),
      optional('tileRows|denseRows|sinkTokens|diagonalTokens'),
      legalAt('denseRows|diagonalTokens', '2147483647', 'more than there are is all'),
    ],
  }),
];

const prefill: MisusedFunction = {
  name: 'skeletonPrefill',
  args: () => ({
    options: {
      epsilon: 0.25,
      referenceTokens: 1000,
      denseLastRows: 64,
      slashBound: 'safe',
      sinkTokens: 1,
      diagonalTokens: 4,
      samples: 50,
      seed: 3,
      ridge: 1e-3,
      formulas: 'corrected',
    },
  }),
  call: ({ options }: { options: never }) => void skeletonPrefill(options),
  legal: [
    optional('options\\.(?!epsilon)\\w+'),
    legalAt('options\\.ridge', '0\\.5', 'a share'),
    legalAt('options\\.epsilon', '\\d.*', 'any number from 0 on'),
    legalAt('options\\.seed', '\\d+', 'any whole number up to 2^53'),
    legalAt('options\\.(denseLastRows|referenceTokens)', '2147483647', 'more than there are is all'),
  ],
};

/** A preset of block scores: what all of them refuse, and options of its own. */
function scoredPreset(name: string, make: (options: never) => unknown, own: object = {}): MisusedFunction {
  return {
    name,
    args: () => ({ options: { budget: 0.25, denseLastRows: 64, sinkTokens: 1, diagonalTokens: 4, ...own } }),
    call: ({ options }: { options: never }) => void make(options),
    legal: [
      optional('options\\.(?!budget)\\w+'),
      legalAt('options\\.budget', '0\\.5', 'a share'),
      legalAt('options\\.denseLastRows', '2147483647', 'more than there are is all'),
    ],
  };
}

const streaming: MisusedFunction = {
  name: 'streamingPrefill',
  args: () => ({ options: { windowTokens: 512, sinkTokens: 4, denseLastRows: 64 } }),
  call: ({ options }: { options: never }) => void streamingPrefill(options),
  legal: [
    optional('options\\.(sinkTokens|denseLastRows)'),
    legalAt('options\\.(windowTokens|denseLastRows)', '2147483647', 'more than there are is all'),
  ],
};

const presets = [
  prefill,
  streaming,
  scoredPreset('antidiagonalPrefill', antidiagonalPrefill, { stride: 8 }),
  scoredPreset('clusteredPrefill', clusteredPrefill),
  scoredPreset('pooledPrefill', pooledPrefill),
  scoredPreset('verticalSlashPrefill', verticalSlashPrefill),
];

const stateBytes: MisusedFunction = {
  name: 'decompositionStateBytes',
  args: () => ({ sizes: { queryHeads: 4, kvHeads: 2, headDim: 8, pairs: 3 } }),
  call: ({ sizes }: { sizes: never }) => void decompositionStateBytes(sizes),
  legal: [legalAt('sizes\\.\\w+', '2147483647', 'a size')],
};

const functions = [...operations, ...presets, stateBytes];

it('covers every export', () => {
  expectAllTried(skeleton, functions, {});
});

describeOnDeviceKinds('misuse', ({ name, open }) => {
  const suite = new MisuseSuite(open());

  it.each(functions)('of $name ends in a typed error, and changes nothing', async (subject) => {
    await suite.misuse(subject);
  });

  it('is counted', () => {
    expect(suite.counts.tries).toBeGreaterThan(500);
    console.log(`misuse of skeleton-prefill on ${name}: ${String(suite.counts)}`);
  });
});
