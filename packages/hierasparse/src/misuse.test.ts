import type { Device, DeviceKind } from '@kv/sparse-core';
import {
  anyFinite,
  anyFloat,
  describeOnDeviceKinds,
  encode,
  expectAllTried,
  freeAxis,
  legalAt,
  type MisusedFunction,
  misusedOperation,
  misusedStore,
  MisuseSuite,
  optional,
  rowsApart,
} from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { ElementMask } from './element-mask.js';
import * as hierasparse from './index.js';
import { blockTokens } from './blocks-24.js';
import { compress24 } from './operations/compress-24.js';
import { copyIndexMap } from './operations/copy-index-map.js';
import { decompress24 } from './operations/decompress-24.js';
import { decodeAttention24 } from './operations/decode-attention-24.js';
import { prefillAttention24 } from './operations/prefill-attention-24.js';
import { testPools } from './testing/test-pools-24.js';

const [slots, kvHeads, width, headDim] = [2, 1, 3, 64];
const denseBlocks = slots * kvHeads * width;

/** Pools whose blocks are all dense, in order. */
function pools(device: Device) {
  const sizes = { dtype: 'f16', headDim, denseBlocks, sparseBlocks: 4, table: [slots, kvHeads, width] } as const;
  const dense = Uint16Array.from({ length: denseBlocks * blockTokens * headDim }, (_, index) => 0x3000 + (index % 1000));
  const { dense: blocks, sparse, table } = testPools(device, sizes, dense, Int32Array.from({ length: denseBlocks }, (_, block) => block));
  return { dense: blocks, sparse: { ...sparse }, table };
}

/** On CUDA the rows of queries and outputs are of the cache's dtype, f16. */
function attention(device: Device) {
  const dtype = device.kind === 'cuda' ? 'f16' : 'f32';
  const numbers = Array.from({ length: 6 * headDim }, (_, index) => Math.sin(index));
  const rows = (axes: readonly ['token', 'queryHead', 'dim']) => device.tensor(dtype, axes, [3, 2, headDim], encode(dtype, numbers));
  return {
    query: rows(['token', 'queryHead', 'dim']),
    output: rows(['token', 'queryHead', 'dim']),
    logSumExp: device.tensor('f32', ['token', 'queryHead'], [3, 2], new Float32Array(6)),
    keys: pools(device),
    values: pools(device),
    keyCounts: device.tensor('i32', ['slot', 'kvHead'], [slots, kvHeads], Int32Array.of(100, 90)),
    slots: device.tensor('i32', ['batch'], [2], Int32Array.of(1, 0)),
    queryStart: device.tensor('i32', ['boundary'], [3], Int32Array.of(0, 2, 3)),
    scale: 0.5,
    causal: true,
    sparseKeys: true,
    sparseValues: true,
  };
}

const attentionRules = (kind: DeviceKind) => ({
  outputs: ['output', 'logSumExp'],
  legal: [
    optional('logSumExp|causal|sparseKeys|sparseValues'),
    anyFinite('scale'),
    // CUDA takes one dtype, and rows at multiples of 16 bytes.
    ...(kind === 'cpu' ? [anyFloat('query|output'), rowsApart('query|output')] : []),
  ],
});

const operationsOn = (kind: DeviceKind): readonly MisusedFunction[] => [
  misusedOperation(
    compress24,
    (device) => ({
      operand: 'keys',
      blocks: pools(device),
      prunings: [{ slot: 0, kvHead: 0, firstBlock: 0, endBlock: 2, sparseIds: [1], freedFrom: 1 }],
      elementMask: new ElementMask(device, 'keys', headDim, Uint8Array.from({ length: blockTokens * headDim }, (_, index) => Number(index % 4 < 2))),
      blockLoss: device.tensor('f32', ['slot', 'kvHead', 'block'], [slots, kvHeads, width], new Float32Array(denseBlocks)),
    }),
    {
      outputs: ['blocks.dense', 'blocks.sparse.nonZeros', 'blocks.sparse.metadata', 'blocks.table'],
      legal: [
        freeAxis('blocks.dense', 'block'),
        optional('elementMask|blockLoss'),
        legalAt('prunings', 'one entry fewer', 'nothing to prune'),
      ],
    },
  ),
  misusedOperation(
    decompress24,
    (device) => {
      const { dense, sparse, table } = pools(device);
      table.dispose();
      return { operand: 'keys', sparse, ids: [0, 1, 2, 3, 0, 1], dense };
    },
    { outputs: ['dense'], legal: [] },
  ),
  misusedOperation(
    copyIndexMap,
    (device) => {
      const { dense, sparse, table: keys } = pools(device);
      for (const tensor of [dense, sparse.nonZeros, sparse.metadata]) tensor.dispose();
      const values = device.tensor('i32', keys.axes, keys.shape, new Int32Array(keys.byteLength / 4));
      return { keys, values, fromSlot: 0, toSlot: 1, dense: { from: [0, 1], to: [3, 4] }, sparse: { from: [0], to: [2] } };
    },
    { outputs: ['keys', 'values'], legal: [] },
  ),
  misusedOperation(prefillAttention24, attention, attentionRules(kind)),
  misusedOperation(decodeAttention24, attention, attentionRules(kind)),
];

const shares = [
  optional('options|options\\.\\w+'),
  legalAt('options', 'an object without prototype', 'no option is given'),
  legalAt('options\\.(keys|values)', 'a function|0\\.5', 'a share, of each layer or of all'),
];

const functions: readonly MisusedFunction[] = [
  {
    name: 'hieraSparsePrefill',
    args: () => ({ options: { keys: 0.5, values: 1 } }),
    call: ({ options }: { options: never }) => void hierasparse.hieraSparsePrefill(options),
    legal: shares,
  },
  {
    name: 'hieraSparseStore',
    args: () => ({ options: { keys: 0.5, values: 1, sinkTokens: 64, localWindow: 128, dtype: 'f16' } }),
    call: ({ options }: { options: never }) => void hierasparse.hieraSparseStore(options),
    legal: [...shares, legalAt('options\\.(sinkTokens|localWindow)', '\\d{10}', 'more than there are is all')],
  },
  {
    name: 'ElementMask',
    args: (device) => ({ device, operand: 'keys', headDim, kept: new Uint8Array(blockTokens * headDim) }),
    call: ({ device, operand, headDim: dims, kept }: { device: Device; operand: 'keys'; headDim: number; kept: Uint8Array }) =>
      new ElementMask(device, operand, dims, kept),
    legal: [],
  },
];

const untried = {
  sparseBlockElements: 'arithmetic of a number',
  sparseBlockWords: 'arithmetic of a number',
  'ElementMask.dispose': 'takes nothing',
  'ElementMask.is': 'says of anything what it is',
};

const stores = misusedStore(
  () => hierasparse.hieraSparseStore({ keys: 0.5, values: 0.5, sinkTokens: 0, localWindow: 0 }),
  'attend',
  'finishPrefill',
  'makeDense',
);

it('covers every export', () => {
  expectAllTried(hierasparse, [...operationsOn('cpu'), ...functions], untried);
});

describeOnDeviceKinds('misuse', ({ name, open }) => {
  const device = open();
  const suite = new MisuseSuite(device);

  it.each([...operationsOn(device.kind), ...functions, ...stores])('of $name ends in a typed error, and changes nothing', async (subject) => {
    await suite.misuse(subject);
  });

  it('is counted', () => {
    expect(suite.counts.tries).toBeGreaterThan(1000);
    console.log(`misuse of hierasparse on ${name}: ${String(suite.counts)}`);
  });
});
