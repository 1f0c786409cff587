import type { Device } from '@kv/sparse-core';
import { describeOnDevices, expectAllTried, type MisusedFunction, misusedOperation, MisuseSuite } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import * as hcattnQuant from './index.js';
import { dequantizeKv } from './operations/dequantize-kv.js';
import { quantizeKv } from './operations/quantize-kv.js';
import { testBlocks } from './testing/test-blocks.js';

const blocks = (device: Device) => ({
  ...testBlocks(device, { dtype: 'f16', headDim: 32, blocks: 2, quantizedBlocks: 2, keyBits: 8, valueBits: 4 }),
  from: [0, 1],
  to: [1, 0],
});

const functions: readonly MisusedFunction[] = [
  misusedOperation(quantizeKv, blocks, { outputs: ['quantizedKeys', 'quantizedValues'], legal: [] }),
  misusedOperation(dequantizeKv, blocks, { outputs: ['keys', 'values'], legal: [] }),
];

const untried = { quantizedBlockBytes: 'arithmetic of numbers' };

it('covers every export', () => {
  expectAllTried(hcattnQuant, functions, untried);
});

describeOnDevices('misuse', ({ name, open }) => {
  const device = open();
  const suite = new MisuseSuite(device);

  it.each(functions)('of $name ends in a typed error, and changes nothing', async (subject) => {
    await suite.misuse(subject);
  });

  it('is counted', () => {
    expect(suite.counts.tries).toBeGreaterThan(500);
    console.log(`misuse of hcattn-quant on ${name}: ${String(suite.counts)}`);
  });
});
