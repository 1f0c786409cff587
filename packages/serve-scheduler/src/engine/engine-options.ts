import { CapabilityError } from '@kv/sparse-core';
import { expectBoolean, expectObject, expectOptions, expectThat, type OptionNames } from '@kv/sparse-core/native';
import { Runner } from '@kv/model';
import type { RunnerModel, RunnerOptions } from '@kv/model';

import { Scheduler } from '../scheduler/scheduler.js';
import type { SchedulerOptions } from '../scheduler/scheduler-options.js';

/** Those of its runner too. Each count is a whole number; those of tokens count tokens of one sequence, whatever its kv heads are. */
export interface EngineOptions extends RunnerOptions {
  /** Requests under way at a time, R_max: from 1 to 2^31 − 1 with `keptPrompts`. Others wait in the order in which they came. Default 8. */
  readonly sequences?: number | undefined;
  /**
   * Reads prompts layer by layer, all of their tokens, instead of some tokens in all layers: a store of two memories has one layer
   * of them on the device. Default: false.
   */
  readonly layerSegments?: boolean | undefined;
  /**
   * Tokens × layers of prompts in a step: fewer let answers go on faster while prompts are read. Default: `maxBatchRows` in all
   * layers; in layer segments what 512 tokens take in all layers. At least a chunk in all layers, in layer segments in one: a
   * chunk has `maxBatchRows` tokens, at most 512 unless the engine is `deterministic` or reads layer segments.
   */
  readonly maxInjectTokens?: number | undefined;
  /**
   * Tokens of an answer that host memory is promised for when its request begins, where the policy's store holds blocks in two
   * memories; other stores promise all. From 0 on. Fewer than answers turn out to have let more requests in; when memory runs
   * out, the least computed one is read again later, and gives the same tokens. Default: all.
   */
  readonly reservedAnswerTokens?: number | undefined;
  /**
   * Prompts that stay in memory when their requests have ended, the least recently used ones leave: a request that begins with
   * the same tokens begins behind them, in steps of 32 tokens, or of `maxBatchRows` in a `deterministic` engine. They are beside
   * `sequences`: a policy that was opened for a number of sequences is opened for both together. From 0 on. Default: 0.
   */
  readonly keptPrompts?: number | undefined;
  /** Tokens of all of these together, beside `cacheTokens`. From 0 on. Default: `keptPrompts × contextTokens`. */
  readonly keptTokens?: number | undefined;
}

const defaultChunk = 512;
/** A block of most stores has as many tokens, or twice that. */
const blockGrid = 32;

const engineOptions: OptionNames<EngineOptions> = {
  ...{ policy: true, rope: true, sequences: true, contextTokens: true, cacheTokens: true, maxBatchRows: true, deterministic: true },
  ...{ activations: true, layerSegments: true, maxInjectTokens: true, reservedAnswerTokens: true, keptPrompts: true, keptTokens: true },
};

/** The options with defaults, where others follow from them. */
export interface EngineSettings extends EngineOptions {
  readonly sequences: number;
  readonly contextTokens: number;
  readonly cacheTokens: number;
  readonly layerSegments: boolean;
  readonly keptPrompts: number;
  readonly keptTokens: number;
}

/** @throws InvalidValueError; CapabilityError for a policy whose prompts cannot be kept */
export function readOptions(model: RunnerModel, given: EngineOptions): EngineSettings {
  expectOptions('createEngine', given, engineOptions);
  expectObject('createEngine', 'model', model);
  expectObject('createEngine', 'model.config', model.config);
  const { layerSegments = false, sequences = 8, contextTokens = Math.min(model.config.maxPositions, 16_384), keptPrompts = 0 } = given;
  const { maxInjectTokens = 1, reservedAnswerTokens = 0 } = given;
  expectBoolean('createEngine', 'layerSegments', layerSegments);
  // The defaults of others are made of these.
  expectCounts({ sequences, contextTokens, maxInjectTokens }, 1);
  expectCounts({ keptPrompts, reservedAnswerTokens }, 0);
  const { cacheTokens = sequences * contextTokens, keptTokens = keptPrompts * contextTokens } = given;
  expectCounts({ cacheTokens }, 1);
  expectCounts({ keptTokens }, 0);
  return { ...given, layerSegments, sequences, contextTokens, cacheTokens, keptPrompts, keptTokens };
}

function expectCounts(counts: Readonly<Record<string, number>>, least: number): void {
  for (const [name, count] of Object.entries(counts)) {
    expectThat('createEngine', name, count, Number.isSafeInteger(count) && count >= least, `a whole number from ${least} on`);
  }
}

/** A runner with room for the prompts that are kept. @throws what `Runner` throws */
export function createRunner(model: RunnerModel, settings: EngineSettings): Runner {
  const { policy, rope, contextTokens, maxBatchRows, deterministic, activations } = settings;
  const [sequences, cacheTokens] = [settings.sequences + settings.keptPrompts, settings.cacheTokens + settings.keptTokens];
  const runner = new Runner(model, { policy, rope, sequences, contextTokens, cacheTokens, maxBatchRows, deterministic, activations });
  try {
    expectSchedulable(runner, settings);
    return runner;
  } catch (error) {
    runner.dispose();
    throw error;
  }
}

/** @throws CapabilityError that names the part of the policy that does not fit */
function expectSchedulable({ uncuttable }: Runner, { keptPrompts }: EngineSettings): void {
  if (keptPrompts === 0 || uncuttable === undefined) return;
  throw new CapabilityError(
    `createEngine: keptPrompts is ${keptPrompts}, and '${uncuttable}' of the policy makes of a prompt what no other prompt can begin ` +
      'with. Leave out keptPrompts, or that part of the policy.',
    { subject: 'keptPrompts', given: uncuttable },
  );
}

/**
 * The scheduler of a runner. Where its store holds blocks in two memories, answers are admitted by what they read of the device's
 * part; of other stores what is counted are tokens of the cache.
 * @param reuse as of the scheduler
 * @throws InvalidValueError, OutOfMemoryError
 */
export function schedulerOf(runner: Runner, settings: EngineSettings, reuse: SchedulerOptions['reuse']): Scheduler {
  const { model, maxBatchRows, contextTokens, residency, deterministic } = runner;
  const { sequences, cacheTokens, layerSegments, maxInjectTokens, reservedAnswerTokens } = settings;
  const { layers, kvHeads } = model.config;
  // Where the runner cuts a long batch: always in layer segments, and wherever bits may not depend on how many chunks a part has.
  const chunkTokens = Math.min(maxBatchRows, layerSegments || deterministic ? contextTokens : defaultChunk);
  const inject = maxInjectTokens ?? (layerSegments ? Math.max(chunkTokens, defaultChunk * layers) : maxBatchRows * layers);
  const limits = {
    model: model.config,
    maxRequests: sequences,
    maxBatchTokens: sequences + Math.max(maxBatchRows, chunkTokens, Math.ceil(inject / layers)),
    maxInjectTokens: inject,
    chunkTokens,
    reuse,
  };
  if (residency) {
    const { blockTokens } = residency;
    // Each sequence may leave a block of each kv head partly filled.
    const hostBlocks = (Math.ceil(cacheTokens / blockTokens) + sequences) * kvHeads;
    return new Scheduler({ ...limits, ...residency, hostBlocks, promptsApart: true, reservedAnswerTokens, features: { layerSegments } });
  }
  // Counted in tokens: whatever a policy's blocks are, its cache has room for so many. The last one of an answer is not fed.
  return new Scheduler({ ...limits, blockTokens: 1, deviceBlocks: (cacheTokens + 1) * kvHeads, features: { sparse: false, layerSegments } });
}

/** A prompt begins behind a kept one at a multiple of so many tokens: where its bits may not depend on that, where a chunk ends. */
export function keptGrid({ deterministic, maxBatchRows }: Runner): number {
  return deterministic ? maxBatchRows : blockGrid;
}
