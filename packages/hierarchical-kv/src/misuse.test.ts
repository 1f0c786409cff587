import type { Device } from '@kv/sparse-core';
import {
  describeOnDeviceKinds,
  expectAllTried,
  freeAxis,
  legalAt,
  type MisusedFunction,
  misusedOperation,
  misusedStore,
  MisuseSuite,
  optional,
  otherEntries,
  rowsApart,
} from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import * as hierarchicalKv from './index.js';
import { blockMetadata } from './operations/block-metadata.js';
import { blockScores } from './operations/block-scores.js';
import { fetchBlocks } from './operations/fetch-blocks.js';
import { forgetBlocks } from './operations/forget-blocks.js';
import { placeBlocks } from './operations/place-blocks.js';
import { planBlocks, workingSetSteps } from './operations/plan-blocks.js';
import { selectTopBlocks } from './operations/select-top-blocks.js';

const [slotCount, kvHeads, width, room, blockTokens] = [2, 2, 3, 3, 4];

function zeros<const A extends readonly string[]>(device: Device, axes: A, shape: { readonly [Axis in keyof A]: number }, fill = 0) {
  return device.tensor('i32', axes, shape, new Int32Array(shape.reduce((product, extent) => product * extent, 1)).fill(fill));
}

/** A row of the second of two slots, whose kv heads have three blocks, and none of the first. */
const batch = (device: Device) => ({
  keyCounts: zeros(device, ['slot', 'kvHead'], [slotCount, kvHeads], 12),
  slots: device.tensor('i32', ['batch'], [2], Int32Array.of(1, 0)),
  queryStart: device.tensor('i32', ['boundary'], [3], Int32Array.of(0, 1, 1)),
});

const table = (device: Device) =>
  device.tensor('i32', ['slot', 'kvHead', 'block'], [slotCount, kvHeads, width], Int32Array.from({ length: 12 }, (_, block) => block));

const halves = (count: number) => new Uint16Array(count).fill(0x3c00);

const described = (device: Device) => ({
  ...batch(device),
  keys: device.tensor('f16', ['block', 'blockToken', 'dim'], [12, blockTokens, 8], halves(12 * 4 * 8)),
  blockTable: table(device),
  metadataTable: table(device),
  metadata: device.tensor('f16', ['metadataBlock', 'vector', 'dim'], [12, 2, 8], halves(12 * 2 * 8)),
  rows: 1,
  method: 'minMax' as const,
});

const scored = (device: Device) => ({
  ...batch(device),
  query: device.tensor('f16', ['token', 'queryHead', 'dim'], [1, 4, 8], halves(32)),
  scores: device.tensor('f32', ['token', 'kvHead', 'block'], [1, kvHeads, width], new Float32Array(6)),
  metadata: device.tensor('f16', ['metadataBlock', 'vector', 'dim'], [12, 2, 8], halves(12 * 2 * 8)),
  blockTable: table(device),
  blockTokens,
});

const chosen = (device: Device) => ({
  chosen: zeros(device, ['slot', 'kvHead', 'chosenBlock'], [slotCount, kvHeads, room]),
  chosenCounts: zeros(device, ['slot', 'kvHead'], [slotCount, kvHeads]),
  ...{ blockTokens, sinkBlocks: 1, recentBlocks: 1 },
});

const selected = (device: Device) => ({
  ...batch(device),
  ...chosen(device),
  scores: device.tensor('f32', ['token', 'kvHead', 'block'], [1, kvHeads, width], new Float32Array(6)),
  budgets: zeros(device, ['slot'], [slotCount], room),
});

const planned = (device: Device) => ({
  ...batch(device),
  ...chosen(device),
  blockTable: table(device),
  where: zeros(device, ['hostBlock'], [12], -1),
  holds: zeros(device, ['cachedBlock'], [8], -1),
  usedAt: zeros(device, ['cachedBlock'], [8]),
  clock: zeros(device, ['one'], [1]),
  history: zeros(device, ['slot', 'kvHead', 'step', 'chosenBlock'], [slotCount, kvHeads, workingSetSteps, room]),
  demand: zeros(device, ['slot', 'kvHead', 'count'], [slotCount, kvHeads, 4]),
  readTable: zeros(device, ['slot', 'kvHead', 'chosenBlock'], [slotCount, kvHeads, room]),
  readCounts: zeros(device, ['slot', 'kvHead'], [slotCount, kvHeads]),
  loads: zeros(device, ['end', 'load'], [2, slotCount * kvHeads * room]),
  loadCount: zeros(device, ['one'], [1]),
  rows: 1,
});

const placed = (device: Device) => ({
  ...batch(device),
  blockTable: table(device),
  sourceTable: table(device),
  where: zeros(device, ['hostBlock'], [12], -1),
  holds: zeros(device, ['cachedBlock'], [8], -1),
  usedAt: zeros(device, ['cachedBlock'], [8]),
  loads: zeros(device, ['end', 'load'], [2, slotCount * kvHeads * width]),
  loadCount: zeros(device, ['one'], [1]),
  ...{ rows: 1, blockTokens, sinkBlocks: 1, firstCached: 8 },
});

const forgotten = (device: Device) => ({
  blockTable: table(device),
  keyCounts: zeros(device, ['slot', 'kvHead'], [slotCount, kvHeads], 12),
  where: zeros(device, ['hostBlock'], [12], -1),
  blockTokens,
});

const fetched = (device: Device) => ({
  hostKeys: device.tensor('f16', ['hostBlock', 'blockToken', 'dim'], [3, 4, 8], halves(96)),
  hostValues: device.tensor('f16', ['hostBlock', 'blockToken', 'dim'], [3, 4, 8], halves(96)),
  keys: device.tensor('f16', ['block', 'blockToken', 'dim'], [3, 4, 8], halves(96)),
  values: device.tensor('f16', ['block', 'blockToken', 'dim'], [3, 4, 8], halves(96)),
  loads: zeros(device, ['end', 'load'], [2, 1]),
  loadCount: zeros(device, ['one'], [1], 1),
});

const moreRows = legalAt('rows', '\\d+', 'of a batch there may be fewer');
const single = [
  legalAt('clock|loadCount', 'gaps within rows', 'a single element has none'),
  legalAt('\\w+', 'over args\\.(clock|loadCount), shifted', 'behind a single element is other memory'),
];

const functions: readonly MisusedFunction[] = [
  misusedOperation(blockMetadata, described, {
    outputs: ['metadata'],
    legal: [freeAxis('keys', 'block|blockToken'), rowsApart('keys'), freeAxis('metadata', 'metadataBlock'), moreRows, ...otherEntries],
  }),
  misusedOperation(blockScores, scored, {
    outputs: ['scores'],
    legal: [
      legalAt('query|metadata', 'f32|bf16', 'any float dtypes'),
      rowsApart('query|scores'),
      freeAxis('scores', 'block'),
      freeAxis('metadata', 'metadataBlock'),
      legalAt('metadata', 'vector = 1', 'a mean instead of a box'),
      ...otherEntries,
    ],
  }),
  misusedOperation(selectTopBlocks, selected, {
    outputs: ['chosen', 'chosenCounts'],
    legal: [freeAxis('chosen', 'chosenBlock'), freeAxis('scores', 'token|block'), rowsApart('scores'), ...otherEntries],
  }),
  misusedOperation(planBlocks, planned, {
    outputs: ['where', 'holds', 'usedAt', 'clock', 'history', 'demand', 'readTable', 'readCounts', 'loads', 'loadCount'],
    legal: [freeAxis('blockTable', 'block'), freeAxis('where', 'hostBlock'), freeAxis('loads', 'load'), moreRows, ...single, ...otherEntries],
  }),
  misusedOperation(placeBlocks, placed, {
    outputs: ['where', 'holds', 'usedAt', 'loads', 'loadCount'],
    legal: [
      freeAxis('where', 'hostBlock'),
      freeAxis('loads', 'load'),
      legalAt('rows|sinkBlocks|firstCached', '\\d+', 'any number of them'),
      ...single,
      ...otherEntries,
    ],
  }),
  misusedOperation(forgetBlocks, forgotten, { outputs: ['where'], legal: [freeAxis('blockTable', 'block'), freeAxis('where', 'hostBlock')] }),
  misusedOperation(fetchBlocks, fetched, { outputs: ['keys', 'values'], legal: [freeAxis('loads', 'load'), ...single] }),
];

const options: MisusedFunction = {
  name: 'hierarchicalStore',
  args: () => ({ options: { deviceBytes: 2 ** 24, budgetTokens: 256, sinkTokens: 32, localWindow: 64, metadata: 'mean', checksums: false, dtype: 'f16' } }),
  call: ({ options: given }: { options: never }) => void hierarchicalKv.hierarchicalStore(given),
  legal: [
    optional('options\\.(budgetTokens|sinkTokens|localWindow|metadata|checksums|dtype)'),
    legalAt('options\\.deviceBytes', '\\d{10,16}', 'more than there are blocks is all'),
  ],
};

const untried = {
  hierarchicalHostBytes: 'checks its options as hierarchicalStore does',
  hierarchicalDeviceBytes: 'checks its options as hierarchicalStore does',
  metadataVectors: 'arithmetic of numbers',
};

it('covers every export', () => {
  expectAllTried(hierarchicalKv, [...functions, options], untried);
});

describeOnDeviceKinds('misuse', ({ name, open }) => {
  const suite = new MisuseSuite(open());

  it.each([...functions, options])('of $name ends in a typed error, and changes nothing', async (subject) => {
    await suite.misuse(subject);
  });

  // On a GPU host memory is made asynchronously.
  it.skipIf(name === 'cuda')('of a store ends in typed errors, and changes nothing', async () => {
    const factory = () => hierarchicalKv.hierarchicalStore({ deviceBytes: 2 ** 24, budgetTokens: 128 });
    for (const subject of misusedStore(factory)) await suite.misuse(subject);
  });

  it('is counted', () => {
    expect(suite.counts.tries).toBeGreaterThan(500);
    console.log(`misuse of hierarchical-kv on ${name}: ${String(suite.counts)}`);
  });
});
