import { expect, it } from 'vitest';
import { DeviceObject } from './device.js';
import type { Device } from './handles.js';
import * as core from './index.js';
import { MappedFileObject } from './mapped-file.js';
import { RecordingObject } from './recording.js';
import { StreamObject } from './stream.js';
import { TensorObject } from './tensor.js';
import { expectAllTried } from './testing/expect-all-tried.js';
import { anyFinite, anyFloat, anyPositive, bothElsewhere, freeAxis, inPlace, legalAt, legalTogether, optional, otherEntries, rowsApart } from './testing/legal-values.js';
import { type MisusedFunction, misusedOperation, MisuseSuite } from './testing/misuse.js';
import { harmlessExports, misusedFunctions } from './testing/misused-functions.js';
import { misusedStore } from './testing/misused-stores.js';
import { describeOnDeviceKinds } from './testing/test-devices.js';
import { pagedWaves, waves } from './testing/wave-tensors.js';

const sizes = { slots: 3, kvHeads: 2, width: 3, blockTokens: 4, dim: 8, tokens: 6 };
const { kvHeads, dim } = sizes;

/** Two entries, of two rows and one. */
function rows(device: Device) {
  return {
    blocks: pagedWaves(device, sizes),
    slots: device.tensor('i32', ['batch'], [2], Int32Array.of(2, 0)),
    queryStart: device.tensor('i32', ['boundary'], [3], Int32Array.of(0, 2, 3)),
  };
}

function attention(device: Device) {
  return {
    ...rows(device),
    query: waves(device, ['token', 'queryHead', 'dim'], [3, 4, dim]),
    output: waves(device, ['token', 'queryHead', 'dim'], [3, 4, dim]),
    logSumExp: waves(device, ['token', 'queryHead'], [3, 4]),
    scale: 0.5,
    causal: true,
  };
}

const attentionLegal = [
  optional('logSumExp|causal'),
  anyFloat('query|output'),
  rowsApart('query|output'),
  freeAxis('blocks.blockTable', 'block'),
  anyFinite('scale'),
  ...otherEntries,
];

const operations: readonly MisusedFunction[] = [
  misusedOperation(
    core.rmsNorm,
    (device) => ({
      input: waves(device, ['token', 'head', 'feature'], [3, 2, 8]),
      weight: waves(device, ['feature'], [8]),
      output: waves(device, ['token', 'head', 'feature'], [3, 2, 8]),
      epsilon: 1e-5,
    }),
    { outputs: ['output'], legal: [rowsApart('input|output'), anyFloat('weight'), inPlace('output', 'input'), anyPositive('epsilon')] },
  ),
  misusedOperation(
    core.appendKv,
    (device) => ({
      ...rows(device),
      keys: waves(device, ['token', 'kvHead', 'dim'], [3, kvHeads, dim]),
      values: waves(device, ['token', 'kvHead', 'dim'], [3, kvHeads, dim]),
    }),
    { outputs: ['blocks.keys', 'blocks.values', 'blocks.keyCounts'], legal: [freeAxis('blocks.blockTable', 'block')] },
  ),
  misusedOperation(
    core.gatherKv,
    (device) => ({
      blocks: pagedWaves(device, sizes),
      slot: 1,
      indices: device.tensor('i32', ['kvHead', 'kept'], [kvHeads, 3], Int32Array.of(0, 2, 5, 1, 3, 4)),
      counts: [3, 2],
      outcomes: device.tensor('i32', ['kvHead'], [kvHeads], new Int32Array(kvHeads)),
    }),
    { outputs: ['blocks.keys', 'blocks.values', 'blocks.keyCounts', 'outcomes'], legal: [freeAxis('blocks.blockTable', 'block'), freeAxis('indices', 'kept'), rowsApart('indices'), optional('outcomes')] },
  ),
  misusedOperation(
    core.copyBlocks,
    (device) => ({ pool: waves(device, ['block', 'blockToken', 'dim'], [6, 4, 8]), from: [0, 1], to: [4, 2] }),
    { outputs: ['pool'], legal: [legalAt('pool', '[fbiu]+\\d+', 'any dtype'), legalAt('pool', 'one axis more', 'any axes'), freeAxis('pool', 'block|blockToken|dim'), bothElsewhere('pool')] },
  ),
  misusedOperation(
    core.writeEntries,
    (device) => ({ table: device.tensor('i32', ['row', 'column'], [3, 2], new Int32Array(6)), at: Int32Array.of(1, 5), entries: Int32Array.of(3, 4) }),
    { outputs: ['table'], legal: [legalAt('table', 'one axis more', 'any axes'), freeAxis('table', 'row|column'), bothElsewhere('table')] },
  ),
  misusedOperation(
    core.transferBlocks,
    (device) => ({
      source: waves(device, ['block', 'blockToken', 'dim'], [6, 4, 8]),
      destination: waves(device, ['block', 'blockToken', 'dim'], [5, 4, 8]),
      from: [0, 1],
      to: [4, 2],
    }),
    { outputs: ['destination'], legal: [freeAxis('source|destination', 'block')] },
  ),
  misusedOperation(
    core.embedding,
    (device) => ({
      table: waves(device, ['row', 'feature'], [5, 8]),
      ids: device.tensor('i32', ['token'], [3], Int32Array.of(4, 0, 2)),
      output: waves(device, ['token', 'feature'], [3, 8]),
      outside: 'fail',
    }),
    { outputs: ['output'], legal: [rowsApart('table|output'), legalAt('ids', 'u32', 'either dtype of indices'), legalAt('table', 'f16|bf16', 'any float dtype, and the output is f32'), freeAxis('table', 'row'), optional('outside')] },
  ),
  misusedOperation(
    core.crossEntropy,
    (device) => ({
      logits: waves(device, ['row', 'vocabulary'], [3, 7]),
      targets: [1, 0, 6],
      output: waves(device, ['row'], [3]),
    }),
    { outputs: ['output'], legal: [rowsApart('logits'), freeAxis('logits', 'vocabulary')] },
  ),
  misusedOperation(
    core.linear,
    (device) => ({
      input: waves(device, ['token', 'in'], [3, 8]),
      rows: device.tensor('i32', ['count'], [1], Int32Array.of(2)),
      accumulate: false,
      weight: waves(device, ['out', 'in'], [5, 8]),
      bias: waves(device, ['out'], [5]),
      output: waves(device, ['token', 'out'], [3, 5]),
    }),
    { outputs: ['output'], legal: [rowsApart('input|weight|output'), anyFloat('weight|bias'), optional('accumulate|bias|rows'), legalAt('rows', 'gaps within rows', 'one number has no gaps'), legalAt('output', 'over args\\.rows, shifted', 'the number ends where it begins')] },
  ),
  misusedOperation(
    core.linear,
    (device) => ({
      input: waves(device, ['token', 'in'], [3, 8]),
      layers: [5, 4].map((out) => ({
        weight: waves(device, ['out', 'in'], [out, 8]),
        output: waves(device, ['token', 'out'], [3, out]),
      })),
    }),
    { outputs: ['layers.0.output', 'layers.1.output'], legal: [rowsApart('input|layers\\.\\d\\.(weight|output)'), anyFloat('layers\\.\\d\\.weight'), legalAt('layers', 'one entry fewer', 'any number of layers')] },
  ),
  misusedOperation(
    core.rope,
    (device) => ({
      input: waves(device, ['token', 'head', 'dim'], [3, 2, 8]),
      positions: device.tensor('i32', ['token'], [3], Int32Array.of(0, 1, 2)),
      inverseFrequencies: waves(device, ['pair'], [4]),
      output: waves(device, ['token', 'head', 'dim'], [3, 2, 8]),
      convention: 'halfSplit',
      attentionScale: 1,
    }),
    { outputs: ['output'], legal: [rowsApart('input|output'), inPlace('output', 'input'), freeAxis('inverseFrequencies', 'pair'), optional('attentionScale'), anyFinite('attentionScale')] },
  ),
  misusedOperation(
    core.sample,
    (device) => ({
      logits: waves(device, ['row', 'vocabulary'], [2, 7]),
      settings: [{ temperature: 0.7, topK: 3, topP: 0.9, minP: 0.1, repetitionPenalty: 1.2, seed: 3 }, { temperature: 0 }],
      steps: [5, 6],
      recent: device.tensor('i32', ['row', 'recent'], [2, 3], Int32Array.of(1, 2, -1, 0, 5, 6)),
      output: device.tensor('i32', ['row'], [2], new Int32Array(2)),
      outcomes: device.tensor('i32', ['row'], [2], new Int32Array(2)),
    }),
    { outputs: ['output', 'outcomes'], legal: [rowsApart('logits|recent'), freeAxis('logits', 'vocabulary'), freeAxis('recent', 'recent'), legalAt('output', 'u32', 'either dtype of indices'), optional('outcomes|settings\\.\\d\\.\\w+'), legalAt('settings\\.\\d', 'an empty array|an object without prototype', 'an object without fields asks for the defaults'), legalTogether('args\\.(recent|settings\\.0)', 'undefined|absent|an empty array|an object without prototype', 'without a penalty nothing recent is read'), anyPositive('settings\\.\\d\\.(temperature|repetitionPenalty)'), legalAt('settings\\.\\d\\.(topP|minP)', '0\\.5', 'a share'), legalAt('settings\\.\\d\\.(topK|seed)|steps\\.\\d', '\\d{10}', 'any whole number')] },
  ),
  misusedOperation(
    core.swiglu,
    (device) => ({
      gate: waves(device, ['token', 'feature'], [3, 8]),
      up: waves(device, ['token', 'feature'], [3, 8]),
      output: waves(device, ['token', 'feature'], [3, 8]),
    }),
    { outputs: ['output'], legal: [rowsApart('gate|up|output'), inPlace('output', 'gate|up')] },
  ),
  misusedOperation(
    core.mergeAttention,
    (device) => {
      const part = () => ({
        output: waves(device, ['token', 'queryHead', 'dim'], [3, 2, 8]),
        logSumExp: waves(device, ['token', 'queryHead'], [3, 2]),
      });
      return { ...part(), other: part() };
    },
    { outputs: ['output', 'logSumExp'], legal: [anyFloat('(other\\.)?output'), rowsApart('(other\\.)?output')] },
  ),
  misusedOperation(core.prefillAttention, attention, { outputs: ['output', 'logSumExp'], legal: attentionLegal }),
  misusedOperation(
    core.blockSparseAttention,
    (device) => ({
      ...attention(device),
      keyBlocks: device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], [4, 2, 1], new Int32Array(8)),
      keyBlockCounts: device.tensor('i32', ['queryHead', 'queryTile'], [4, 2], new Int32Array(8).fill(1)),
    }),
    { outputs: ['output', 'logSumExp'], legal: [...attentionLegal, freeAxis('keyBlocks', 'listedBlock')] },
  ),
  misusedOperation(core.decodeAttention, (device) => ({ ...attention(device), apart: true }), {
    outputs: ['output', 'logSumExp'],
    legal: [...attentionLegal, optional('apart')],
  }),
];

const stores = misusedStore(() => core.densePagedStore({ dtype: 'f16', blockTokens: 4 }));

it('covers every export', () => {
  // What users only get instances of.
  const classes = {
    ...{ Device: DeviceObject, MappedFile: MappedFileObject, Recording: RecordingObject },
    ...{ Stream: StreamObject, Tensor: TensorObject },
  };
  expectAllTried({ ...core, ...classes }, [...operations, ...misusedFunctions], harmlessExports);
});

describeOnDeviceKinds('misuse', ({ name, open }) => {
  const suite = new MisuseSuite(open());

  it.each([...operations, ...misusedFunctions, ...stores])('of $name ends in a typed error, and changes nothing', async (subject) => {
    await suite.misuse(subject);
  });

  it('is counted', () => {
    expect(suite.counts.tries).toBeGreaterThan(1000);
    console.log(`misuse of sparse-core on ${name}: ${String(suite.counts)}`);
  });
});
