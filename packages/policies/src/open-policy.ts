import { access } from 'node:fs/promises';
import { join } from 'node:path';

import { hcAttentionHostBytes, hcAttentionStore, loadCodebooks, placeCodebooks } from '@kv/hcattn-quant';
import type { CodedOptions } from '@kv/hcattn-quant';
import { hierarchicalDeviceBytes, hierarchicalHostBytes, hierarchicalStore } from '@kv/hierarchical-kv';
import { CapabilityError, hostPool, kvPolicy } from '@kv/sparse-core';
import type { Device, KvCapacity, KvLayer, KvPolicy, KvPolicyParts } from '@kv/sparse-core';
import { expectObject, expectThat, isDevice } from '@kv/sparse-core/native';

import { policyOf } from './policies.js';
import type { CodedReading, HostedReading, Reading } from './policies.js';

/** What a policy needs to know of a model: a `Model` of `@kv/model` is one. */
export interface PolicyModel {
  /** In which its codebooks lie: `codebooks-GROUPS.safetensors`. */
  readonly directory: string;
  readonly device: Device;
  readonly config: Readonly<Record<'layers' | 'queryHeads' | 'kvHeads' | 'headDim', number>>;
  fingerprint(): Promise<string>;
}

/** The cache that a policy is opened for. Its counts are those of `createRunner`. */
export interface PolicyCache {
  readonly contextTokens: number;
  /** Default: 1. */
  readonly sequences?: number | undefined;
}

/** A policy, with what it has loaded. It serves one runner, which must be disposed of first. */
export interface OpenPolicy extends Disposable {
  readonly policy: KvPolicy;
}

export interface OpenReading extends Disposable {
  readonly parts: KvPolicyParts;
}

/**
 * Makes the policy of a name for a runner of a model, with the codebooks and the host memory that it needs.
 * @throws InvalidValueError when there is no such policy, or what it needs to know of model and cache is wrong
 * @throws CapabilityError when it needs codebooks that the model lacks, ModelFormatError when they are another model's
 * @throws OutOfMemoryError
 */
export async function openPolicy(name: string, model: PolicyModel, cache: PolicyCache): Promise<OpenPolicy> {
  const { reading, select } = policyOf(name);
  const { parts, ...opened } = await openReading(reading, model, cache);
  return { ...opened, policy: kvPolicy({ ...parts, select: select?.() }) };
}

/**
 * The same of a policy without its selection.
 * @throws InvalidValueError, and what opening the parts throws
 */
export async function openReading(reading: Reading, model: PolicyModel, cache: PolicyCache): Promise<OpenReading> {
  if ('parts' in reading) return { parts: reading.parts(), [Symbol.dispose]: () => undefined };
  expectModel(model);
  expectObject('openPolicy', 'cache', cache);
  return 'dimsOfCode' in reading ? await openCoded(reading, model, cache) : await openHosted(reading, model, cache);
}

async function openCoded(reading: CodedReading, model: PolicyModel, cache: PolicyCache): Promise<OpenReading> {
  const keys = await placeCodebooks(model.device, await codebooksOf(reading, model));
  try {
    const options: CodedOptions = { ...reading.options, keys, valuesOn: 'host' };
    const prefill = reading.prefill?.();
    const [layers, capacity] = sizesOf(model, cache);
    const pool = await hostPool(model.device, { bytes: hcAttentionHostBytes(options, layers, { ...capacity, prefill }) });
    const store = hcAttentionStore({ ...options, hostPool: pool });
    const dispose = () => {
      pool.dispose();
      keys[Symbol.dispose]();
    };
    return { parts: { prefill, store }, [Symbol.dispose]: dispose };
  } catch (error) {
    keys[Symbol.dispose]();
    throw error;
  }
}

async function openHosted({ budgetTokens, deviceShare }: HostedReading, model: PolicyModel, cache: PolicyCache): Promise<OpenReading> {
  const [layers, capacity] = sizesOf(model, cache);
  const options = { budgetTokens };
  // As many bytes as a dense cache has, of elements of 16 bits.
  const bytes = hierarchicalHostBytes(options, layers, capacity);
  const least = hierarchicalDeviceBytes(options, layers, capacity, capacity.slots);
  const deviceBytes = deviceShare === undefined ? Number.MAX_SAFE_INTEGER : Math.max(least, Math.ceil(deviceShare * bytes));
  const pool = await hostPool(model.device, { bytes });
  const store = hierarchicalStore({ ...options, deviceBytes, hostPool: pool });
  return {
    parts: { store },
    [Symbol.dispose]: () => {
      pool.dispose();
    },
  };
}

function sizesOf({ device, config }: PolicyModel, { contextTokens, sequences = 1 }: PolicyCache): [KvLayer[], KvCapacity] {
  const layers = Array.from({ length: config.layers }, (_, index) => ({ ...config, index }));
  return [layers, { device, slots: sequences, tokensPerSlot: contextTokens, tokens: sequences * contextTokens }];
}

/** A safetensors file has two tensors a layer, and at most 16,384. */
const mostLayers = 8192;

/** @throws InvalidValueError, DeviceError */
function expectModel(model: PolicyModel): void {
  const name = 'openPolicy';
  expectObject(name, 'model', model);
  const { device, config, directory } = model;
  expectObject(name, 'model.config', config);
  const { layers, headDim } = config;
  expectThat(name, 'model.device', device, isDevice(device), 'a device of createDevice()');
  expectThat(name, 'model.directory', directory, typeof directory === 'string' && !directory.includes('\0'), 'the path of the model');
  expectThat(name, 'model.fingerprint', model, typeof model.fingerprint === 'function', 'a function');
  expectThat(name, 'model.config.layers', layers, Number.isInteger(layers) && layers > 0 && layers <= mostLayers, `a whole number from 1 to ${mostLayers}`);
  expectThat(name, 'model.config.headDim', headDim, Number.isInteger(headDim) && headDim > 0, 'a positive whole number');
}

async function codebooksOf({ name, dimsOfCode }: CodedReading, model: PolicyModel) {
  const { directory } = model;
  const groups = model.config.headDim / dimsOfCode;
  const file = join(directory, `codebooks-${groups}.safetensors`);
  const isThere = await access(file).then(
    () => true,
    () => false,
  );
  if (isThere) return await loadCodebooks(file, { model: await model.fingerprint() });
  throw new CapabilityError(
    `The policy '${name}' needs codebooks of the model's keys, and ${file} is not there. ` +
      `Make it: kv calibrate ${directory} --groups ${groups} --text FILE --out ${file}`,
    { subject: 'codebooks', given: file },
  );
}
