import { InvalidValueError, kvPolicy, ropeDescription } from '@kv/sparse-core';
import type { FloatDType, KvPolicy, KvSelector, RopeDescription } from '@kv/sparse-core';
import { expectBoolean, expectObject, expectOptions, expectPolicy, expectThat, isFinite32, type OptionNames, show } from '@kv/sparse-core/native';

import { expectWholeNumber } from '../expect-whole-number.js';
import type { RunnerModel } from './runner-model.js';

const defaultContextTokens = 16_384;
const defaultBatchRows = 512;
/** Slots are i32 on the device. */
const mostSequences = 2 ** 31 - 1;

export interface RunnerOptions {
  /** How prompts are computed and what the cache keeps. Default: dense attention, dense f16 cache. */
  readonly policy?: KvPolicy | undefined;
  /** How positions turn queries and keys. Default: as config.json says, with frequencies in f32. */
  readonly rope?: RopeDescription | undefined;
  /** Sequences at the same time. Default 1. */
  readonly sequences?: number | undefined;
  /** Tokens of the longest sequence, prompt and answer. Default: the model's own limit, at most 16,384. */
  readonly contextTokens?: number | undefined;
  /** Tokens of all sequences together. Default: `sequences × contextTokens`. */
  readonly cacheTokens?: number | undefined;
  /** Rows of the largest batch, which sizes the working memory. Default 512. */
  readonly maxBatchRows?: number | undefined;
  /**
   * Whether an answer's bits follow from its prompt and the settings alone, whatever else is computed. Steps of answers then
   * have as many rows as the runner has sequences, prompts are alone in their batch, and the store must have the capability
   * `answersApart`. Default: false, which is faster.
   */
  readonly deterministic?: boolean | undefined;
  /**
   * Element type of the rows between the layers: f32, or that of the weights. Default: f32 on a CPU, that of the
   * weights on CUDA, whose tensor cores multiply nothing wider.
   */
  readonly activations?: FloatDType | undefined;
}

const runnerOptions: OptionNames<RunnerOptions> = {
  ...{ policy: true, rope: true, sequences: true, contextTokens: true },
  ...{ cacheTokens: true, maxBatchRows: true, deterministic: true, activations: true },
};

export interface SequenceOptions {
  /** Chooses what the cache keeps when the prompt ends. Default: the runner's policy, or that of a forked sequence. */
  readonly select?: KvSelector | undefined;
  /**
   * Tokens of each kv head that its answers read, of a store that reads some of those it holds; at most the store's own budget.
   * Default: that of the store, or of a forked sequence.
   */
  readonly budgetTokens?: number | undefined;
}

export interface ForkOptions extends SequenceOptions {
  /**
   * How many tokens the fork has: the first ones. Default: all. A fork that ends inside an unfinished prompt has none of
   * that prompt's queries: its selection observes those that are read from there on.
   */
  readonly tokens?: number | undefined;
}

/**
 * The options of a runner, with the defaults of those that are left out.
 * @throws InvalidValueError for what is none, or does not fit the model
 */
export function runnerSettings(model: RunnerModel, options: RunnerOptions) {
  expectOptions('createRunner', options, runnerOptions);
  const { config, device, weights } = model;
  const {
    policy = kvPolicy(),
    sequences = 1,
    contextTokens = Math.min(config.maxPositions, defaultContextTokens),
    maxBatchRows = defaultBatchRows,
    deterministic = false,
    rope = ropeDescription({ ...config.rope, headDim: config.headDim }),
    activations = device.kind === 'cpu' ? 'f32' : weights.embedding.dtype,
  } = options;
  expectWholeNumber('sequences', sequences, 1, mostSequences);
  expectWholeNumber('contextTokens', contextTokens, 1, config.maxPositions);
  const { cacheTokens = sequences * contextTokens } = options;
  expectWholeNumber('cacheTokens', cacheTokens, 1, Number.MAX_SAFE_INTEGER);
  expectWholeNumber('maxBatchRows', maxBatchRows, 1, Number.MAX_SAFE_INTEGER);
  expectBoolean('createRunner', 'deterministic', deterministic);
  // A step has a row for each sequence.
  if (deterministic) expectWholeNumber('maxBatchRows of a deterministic runner', maxBatchRows, sequences, Number.MAX_SAFE_INTEGER);
  expectActivations(activations, weights.embedding.dtype);
  expectPolicy('createRunner', policy);
  expectRope(rope, config.headDim);
  return { policy, rope, sequences, contextTokens, cacheTokens, maxBatchRows, deterministic, activations };
}

/** @throws InvalidValueError */
function expectActivations(given: FloatDType, weights: FloatDType): void {
  if (given === 'f32' || given === weights) return;
  throw new InvalidValueError(`activations is ${show(given)}; this model's may be 'f32' or, as its weights, '${weights}'.`, {
    subject: 'activations',
    given,
    wanted: ['f32', weights],
  });
}

/** @throws InvalidValueError unless it says how heads of so many dims turn */
function expectRope(given: RopeDescription, headDim: number): void {
  expectObject('createRunner', 'rope', given);
  const { convention, inverseFrequencies, attentionScale } = given;
  const pairs = ArrayBuffer.isView(inverseFrequencies) && inverseFrequencies instanceof Float32Array ? inverseFrequencies.length : 0;
  const isRope =
    ['halfSplit', 'interleaved'].includes(convention) && isFinite32(attentionScale) && pairs > 0 && 2 * pairs <= headDim;
  expectThat('createRunner', 'rope', given, isRope, `of ropeDescription(), for heads of ${headDim} dims`);
}
