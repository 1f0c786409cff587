import { type FloatDType, HostPool, type KvCapacity, type KvLayer, type KvStoreFactory } from '@kv/sparse-core';
import { expectBoolean, expectCapacity, expectOptions, expectThat, floats, type OptionNames } from '@kv/sparse-core/native';
import { type BlockMetadata, expectMetadata } from './block-metadata-method.js';
import { blockTokens } from './store/block-sizes.js';
import { createStores, deviceBytesFor, hostBytes, type StoresOptions } from './store/create-stores.js';

export interface HierarchicalOptions extends BlockOptions {
  /** What the stores of all layers may take on the device. What their tables and work leave of it is for blocks. */
  readonly deviceBytes: number;
  /**
   * Of `hierarchicalHostBytes` or more. It may be disposed of once the stores are made. On the CPU it can be left out, for all
   * memory is the host's.
   */
  readonly hostPool?: HostPool | undefined;
}

/** Which blocks answers read, and how they are held. */
export interface BlockOptions {
  /** Tokens of each kv head that an answer reads, rounded up to blocks of 32. Default: 2048. */
  readonly budgetTokens?: number | undefined;
  /** First tokens that it always reads, rounded up to blocks; part of the budget. Default: 32. */
  readonly sinkTokens?: number | undefined;
  /** Last tokens that it always reads, rounded up to blocks, beside the newest block; part of the budget. Default: 64. */
  readonly localWindow?: number | undefined;
  /** What blocks are scored by, or who makes it. Default: 'cuboidMean'. */
  readonly metadata?: BlockMetadata | undefined;
  /**
   * Whether blocks that come from host memory are compared with checksums, made when they were filled: a step whose block is not
   * what was written fails. Default: false.
   */
  readonly checksums?: boolean | undefined;
  /** Element type of keys and values. Default: that of the rows if it has 16 bits, else f16. */
  readonly dtype?: FloatDType | undefined;
}

const name = 'hierarchicalStore';

const optionNames: OptionNames<HierarchicalOptions> = {
  ...{ deviceBytes: true, hostPool: true, budgetTokens: true, sinkTokens: true },
  ...{ localWindow: true, metadata: true, checksums: true, dtype: true },
};

/**
 * Keys and values in two memories: all of them on the host, in blocks of 32 tokens of one kv head, and on the device those
 * that answers read. Each step of an answer scores all blocks of its sequence and reads the best, up to `budgetTokens`, with
 * those of the first and of the last tokens. What the device lacks is loaded into the places of the blocks that were not read
 * for longest. A sequence that is not longer than the budget is read in whole. Prompts attend to all of their tokens. A selection is
 * made of the keys on the host, and answers read of what it kept.
 * @throws InvalidValueError when an option is none, or the budget smaller than sinks and window. Making stores throws
 * OutOfMemoryError when `deviceBytes` cannot hold what a step of the longest sequence reads, InvalidValueError without a host
 * pool where the device has memory of its own, CapabilityError for layers of different kv heads
 */
export function hierarchicalStore(options: HierarchicalOptions): KvStoreFactory {
  const stores = storesOptions(options);
  const { deviceBytes, hostPool } = options;
  expectThat(name, 'deviceBytes', deviceBytes, Number.isSafeInteger(deviceBytes) && deviceBytes > 0, 'a whole number of bytes');
  expectThat(name, 'hostPool', hostPool, hostPool === undefined || HostPool.is(hostPool), 'a pool of hostPool()');
  const memory = { deviceBytes, hostPool };
  return {
    name: stores.name,
    create: (layers, capacity) => createStores(expectCapacity(layers, capacity), capacity, stores, memory),
  };
}

/** Bytes of the host pool that stores with these options take. @throws InvalidValueError, ShapeError */
export function hierarchicalHostBytes(options: BlockOptions, layers: readonly KvLayer[], capacity: KvCapacity): number {
  storesOptions(options);
  return hostBytes(expectCapacity(layers, capacity), capacity, options.dtype);
}

/**
 * The `deviceBytes` with which steps of so many answers find room for what they read, whatever their lengths; none works with
 * less than those of one answer.
 * @throws InvalidValueError, ShapeError, CapabilityError
 */
export function hierarchicalDeviceBytes(options: BlockOptions, layers: readonly KvLayer[], capacity: KvCapacity, answers: number): number {
  const stores = storesOptions(options);
  expectThat(name, 'answers', answers, Number.isSafeInteger(answers) && answers > 0, 'a number of answers');
  return deviceBytesFor(expectCapacity(layers, capacity), capacity, stores, answers);
}

/** @throws InvalidValueError */
function storesOptions(options: BlockOptions): StoresOptions {
  expectOptions(name, options, optionNames);
  const { budgetTokens = 2048, sinkTokens = 32, localWindow = 64, metadata = 'cuboidMean', checksums = false, dtype } = options;
  for (const [subject, given, least] of [
    ['budgetTokens', budgetTokens, 1],
    ['sinkTokens', sinkTokens, 0],
    ['localWindow', localWindow, 0],
  ] as const) {
    expectThat(name, subject, given, Number.isSafeInteger(given) && given >= least, `a whole number, ${least} or more`);
  }
  expectMetadata(name, metadata);
  expectBoolean(name, 'checksums', checksums);
  expectThat(name, 'dtype', dtype, dtype === undefined || floats.includes(dtype), floats.join(', '));
  const [budgetBlocks, sinkBlocks, windowBlocks] = [budgetTokens, sinkTokens, localWindow].map((tokens) => Math.ceil(tokens / blockTokens)) as [number, number, number];
  const recentBlocks = windowBlocks + 1;
  const least = (sinkBlocks + recentBlocks) * blockTokens;
  expectThat(name, 'budgetTokens', budgetTokens, budgetBlocks * blockTokens >= least && budgetBlocks < 2 ** 20, `${least} or more, for sinks, window and the newest block, and below 2^25`);
  return { name: `hierarchical ${budgetBlocks * blockTokens}`, budgetBlocks, sinkBlocks, recentBlocks, metadata, checksums, dtype };
}
