import { CapabilityError, InvalidValueError, sample } from '@kv/sparse-core';
import type { KvSelector, SampleSettings, Stream } from '@kv/sparse-core';
import { expectBoolean, expectObject, expectSelector, expectSignal, listOf } from '@kv/sparse-core/native';
import type { Runner, RunnerOptions } from '@kv/model';

import { Scheduler } from '../scheduler/scheduler.js';

export interface EngineOptions extends RunnerOptions {
  /** Requests under way at a time. Default 8. */
  readonly sequences?: number | undefined;
  /**
   * Reads prompts layer by layer, all of their tokens at once, instead of in chunks of tokens. Wants `maxBatchRows` to be at
   * least `contextTokens`. Default: false.
   */
  readonly layerSegments?: boolean | undefined;
  /**
   * Tokens × layers of prompts in a step: fewer let answers go on faster while prompts are read. Default: `maxBatchRows` in all
   * layers; in layer segments what 512 tokens take in all layers, or the longest prompt in one.
   */
  readonly maxInjectTokens?: number | undefined;
}

export interface EngineRequestOptions {
  /** Default: as many as the context has room for, which also limits a larger number. At least 1. */
  readonly maxTokens?: number | undefined;
  /** How tokens are chosen. Default: always the most likely one. */
  readonly sampling?: SampleSettings | undefined;
  /** Token ids that end the answer. Default: those of the model. */
  readonly endIds?: readonly number[] | undefined;
  /** What the cache keeps of the prompt. Default: as the policy says. */
  readonly select?: KvSelector | undefined;
  readonly signal?: AbortSignal | undefined;
}

export const defaultSequences = 8;
const defaultChunk = 512;
const mostEndIds = 65_536;

/** A request's options with their defaults, checked. */
export interface EngineRequest {
  readonly maxTokens: number;
  readonly sampling: SampleSettings;
  readonly endIds: readonly number[];
  readonly select: KvSelector | undefined;
  readonly signal: AbortSignal | undefined;
}

/**
 * The scheduler of a runner whose cache is all on the device.
 * @throws InvalidValueError; CapabilityError for layer segments of prompts that are longer than a batch
 */
export function schedulerOf(
  { model, maxBatchRows, contextTokens }: Runner,
  { sequences = defaultSequences, cacheTokens = sequences * contextTokens, layerSegments = false, maxInjectTokens }: EngineOptions,
): Scheduler {
  expectBoolean('createEngine', 'layerSegments', layerSegments);
  const { layers, kvHeads } = model.config;
  if (layerSegments && maxBatchRows < contextTokens) {
    throw new CapabilityError(
      `Layer segments read a prompt as one batch: maxBatchRows is ${maxBatchRows}, and prompts may have ${contextTokens} tokens. ` +
        'Give a larger maxBatchRows, or fewer contextTokens.',
      { subject: 'layerSegments', given: maxBatchRows, wanted: contextTokens },
    );
  }
  // A layer is not cut between two batches of one sequence.
  const chunkTokens = layerSegments ? contextTokens : Math.min(defaultChunk, maxBatchRows);
  const inject = maxInjectTokens ?? (layerSegments ? Math.max(contextTokens, defaultChunk * layers) : maxBatchRows * layers);
  return new Scheduler({
    model: model.config,
    // Counted in tokens: whatever a policy's blocks are, its cache has room for so many.
    blockTokens: 1,
    deviceBlocks: cacheTokens * kvHeads,
    maxRequests: sequences,
    maxBatchTokens: sequences + Math.max(maxBatchRows, chunkTokens),
    maxInjectTokens: inject,
    chunkTokens,
    features: { sparse: false, layerSegments },
  });
}

/** @throws InvalidValueError, CapabilityError */
export function readRequest(runner: Runner, promptTokens: number, given: EngineRequestOptions): EngineRequest {
  expectObject('generateTokens', 'options', given);
  const { maxTokens = runner.contextTokens, sampling = { temperature: 0 }, endIds = runner.model.config.eosIds, select, signal } = given;
  expectSignal('generateTokens', signal);
  expectSelector('generateTokens', select, runner.policy.prefill);
  if (!Number.isInteger(maxTokens) || maxTokens < 1) {
    throw new InvalidValueError('generateTokens: maxTokens must be a whole number from 1 on.', { subject: 'maxTokens', given: maxTokens });
  }
  expectObject('generateTokens', 'sampling', sampling);
  const settings = { ...sampling };
  expectSampling(runner.stream, settings);
  // The last token is not fed.
  const room = runner.contextTokens - promptTokens + 1;
  const ends = listOf('generateTokens', 'endIds', endIds, mostEndIds);
  return { maxTokens: Math.min(maxTokens, room), sampling: settings, endIds: ends, select, signal };
}

/** Choosing from a vocabulary of one shows bad settings now. */
function expectSampling(stream: Stream, settings: SampleSettings): void {
  const { device } = stream;
  using logits = device.tensor('f32', ['row', 'vocabulary'], [1, 1], new Float32Array(1));
  using recent = device.tensor('i32', ['row', 'recent'], [1, 1], new Int32Array(1));
  using output = device.tensor('i32', ['row'], [1]);
  sample(stream, { logits, settings: [settings], steps: [0], recent, output });
}
