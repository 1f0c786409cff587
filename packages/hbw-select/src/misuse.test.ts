import type { Device } from '@kv/sparse-core';
import {
  anyFloat,
  anyPositive,
  describeOnDeviceKinds,
  expectAllTried,
  freeAxis,
  type LegalValue,
  legalAt,
  type MisusedFunction,
  misusedOperation,
  MisuseSuite,
  optional,
  pagedWaves,
  rowsApart,
  waves,
} from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import * as hbw from './index.js';
import { observationScores } from './operations/observation-scores.js';
import { selectTokens } from './operations/select-tokens.js';

const sizes = { slots: 2, kvHeads: 2, width: 3, blockTokens: 4, dim: 8, tokens: 9 };
const { kvHeads, dim } = sizes;

function observed(device: Device) {
  return {
    query: waves(device, ['token', 'queryHead', 'dim'], [3, 4, dim]),
    scores: device.tensor('f32', ['batch', 'kvHead', 'token'], [2, kvHeads, 10], new Float32Array(20 * kvHeads)),
    blocks: pagedWaves(device, sizes),
    slots: device.tensor('i32', ['batch'], [2], Int32Array.of(1, 0)),
    queryStart: device.tensor('i32', ['boundary'], [3], Int32Array.of(0, 2, 3)),
    scale: 0.5,
    domain: 'full',
    groupReduction: 'mean',
  };
}

function selected(device: Device) {
  const row = { prefixTokens: 8, windowTokens: 1, capacity: 4, blockTokens: 1 };
  return {
    scores: waves(device, ['batch', 'kvHead', 'token'], [1, kvHeads, 8]),
    indices: device.tensor('i32', ['batch', 'kvHead', 'kept'], [1, kvHeads, 5], new Int32Array(5 * kvHeads)),
    counts: device.tensor('i32', ['batch', 'kvHead'], [1, kvHeads], new Int32Array(kvHeads)),
    rows: [[row, { ...row, capacity: 5 }]],
    rounds: [1, 2],
    dedup: 'refill',
    remainder: 'fill',
    sinkTokens: 1,
    pooling: { kind: 'average', tokens: 3 },
  };
}

const operations: readonly MisusedFunction[] = [
  misusedOperation(observationScores, observed, {
    outputs: ['scores'],
    legal: [
      anyFloat('query'),
      freeAxis('query', 'token'),
      rowsApart('query'),
      freeAxis('scores', 'token'),
      freeAxis('blocks.blockTable', 'block'),
      anyPositive('scale'),
      optional('domain|groupReduction'),
    ],
  }),
  misusedOperation(selectTokens, selected, {
    outputs: ['indices', 'counts'],
    legal: [
      optional('rounds|dedup|remainder|sinkTokens|pooling'),
      freeAxis('scores', 'token'),
      freeAxis('indices', 'kept'),
      rowsApart('counts'),
      legalAt('rounds', 'one entry (more|fewer)', 'any number of rounds'),
      legalAt('(rows\\.0\\.\\d\\.blockTokens|rounds\\.\\d|sinkTokens|pooling\\.tokens)', '2147483647', 'more than there are is all'),
    ],
  }),
];

const factory = (
  name: string,
  make: (options: never) => unknown,
  options: object,
  legal: readonly LegalValue[] = [],
): MisusedFunction => ({
  name,
  args: () => ({ options }),
  call: ({ options: given }: { options: never }) => void make(given),
  legal: [
    optional('options\\.(?!capacity|keepRatio)\\w+'),
    legalAt('options\\.(capacity|keepRatio)', 'a function|an array', 'a number for each layer'),
    legalAt('options\\.(capacity|window|\\w+Tokens|rounds\\.\\d|pooling\\.tokens)', '2147483647', 'more than there are is all'),
    ...legal,
  ],
});

const aShare = legalAt('options\\.(keepRatio|headFloor)', '0\\.5', 'a share');

const functions: readonly MisusedFunction[] = [
  factory('hbw', hbw.hbw, {
    capacity: 64,
    window: 8,
    windowInCapacity: true,
    blockTokens: 4,
    scoreDomain: 'full',
    groupReduction: 'mean',
    headFloor: 0.5,
    rounds: [1, 2],
    dedup: 'refill',
    remainder: 'fill',
    sinkTokens: 2,
    pooling: { kind: 'max', tokens: 3 },
  }, [aShare, legalAt('options\\.rounds', 'one entry (more|fewer)', 'any number of rounds')]),
  factory('snapKv', hbw.snapKv, { keepRatio: 0.25, window: 8, pooling: { kind: 'average', tokens: 5 }, groupReduction: 'max' }, [aShare]),
  factory('streaming', hbw.streaming, { capacity: 64, sinkTokens: 4 }),
  factory('halo', hbw.halo, { capacity: 64, window: 8, haloTokens: 5, headFloor: 1 }, [aShare]),
];

const untried = { keptTokens: 'arithmetic of numbers that selectTokens checks' };

it('covers every export', () => {
  expectAllTried(hbw, [...operations, ...functions], untried);
});

describeOnDeviceKinds('misuse', ({ name, open }) => {
  const suite = new MisuseSuite(open());

  it.each([...operations, ...functions])('of $name ends in a typed error, and changes nothing', async (subject) => {
    await suite.misuse(subject);
  });

  it('is counted', () => {
    expect(suite.counts.tries).toBeGreaterThan(1000);
    console.log(`misuse of hbw-select on ${name}: ${String(suite.counts)}`);
  });
});
