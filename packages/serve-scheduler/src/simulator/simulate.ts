import { setImmediate } from 'node:timers/promises';

import { OutOfMemoryError } from '@kv/sparse-core';
import { expectObject, expectOptions, expectSignal, expectThat, listOf } from '@kv/sparse-core/native';

import { Scheduler } from '../scheduler/scheduler.js';
import type { ScheduledRequest } from '../scheduler/request.js';
import { pinnedBlocks } from '../scheduler/scheduler-options.js';
import type { Locality } from './block-reader.js';
import { Costs } from './costs.js';
import { SimulatedExecutor } from './simulated-executor.js';
import type { SpentTime } from './simulated-executor.js';
import type { SimulatedModel, SystemFeatures } from './systems.js';
import type { TracedRequest } from './trace.js';

export interface SimulationOptions {
  readonly model: SimulatedModel;
  readonly features: SystemFeatures;
  readonly trace: readonly TracedRequest[];
  /** Default: those of one H200. */
  readonly costs?: Costs | undefined;
  /** How blocks that answers read follow each other. Default: after the paper's figures. */
  readonly locality?: Locality | undefined;
  /** Of the blocks that answers read. Default 1. */
  readonly seed?: number | undefined;
  /** R_max. Default: that of the model. */
  readonly maxRequests?: number | undefined;
  /** Tokens of prompts in a step, in all layers. Default 2048. */
  readonly promptTokens?: number | undefined;
  /**
   * Blocks of a layer that an engine's store has on the device for what answers read, beside prompts and metadata. Default: what
   * the model's bytes hold, of which prompts and metadata take their part.
   */
  readonly storeBlocks?: number | undefined;
  readonly signal?: AbortSignal | undefined;
}

/** Times are in milliseconds. */
export interface SimulationResult {
  readonly requests: number;
  /** From the arrival of a request to its first token, the mean. */
  readonly firstToken: number;
  /** From the arrival to the first part of the prompt that is computed, the mean. */
  readonly queueing: number;
  /** Between two tokens of an answer, the mean. */
  readonly betweenTokens: number;
  /** The median of the same. */
  readonly betweenTokens50: number;
  /** What 99 of 100 of the same stay below. */
  readonly betweenTokens99: number;
  /** Of all answers, from the first arrival to the last token. */
  readonly tokensPerSecond: number;
  /** Blocks that a step loads, of all heads and layers, the mean. */
  readonly loadsPerStep: number;
  readonly steps: number;
  /** Of the steps that answer, the mean. */
  readonly answersPerStep: number;
  /** Of all steps, by what it went to. */
  readonly spent: Readonly<SpentTime>;
  /** How often requests were left out of steps for want of memory. */
  readonly resets: number;
}

interface Times {
  readonly arrival: number;
  begun?: number | undefined;
  tokens: number[];
}

/** The simulator lets others run after so many steps. */
const stepsInTurn = 256;
export const mostRequests = 1e7;

/** A scheduler for a model with so many bytes of cache, of which pinned blocks take their part. */
function schedulerOf({ model, features, maxRequests = model.maxRequests ?? 32, promptTokens = 2048, storeBlocks }: SimulationOptions): Scheduler {
  const { layers, kvHeads, headDim, deviceBytes, hostBytes } = model;
  const sizes = { blockTokens: 32, sinkTokens: 32, localWindow: 64 };
  const layerBytes = layers * 4 * sizes.blockTokens * headDim;
  const pinned = features.offload ? pinnedBlocks(sizes) * kvHeads * maxRequests : 0;
  return new Scheduler({
    ...sizes,
    model,
    features,
    deviceBlocks: storeBlocks ?? Math.floor(deviceBytes / layerBytes) - pinned,
    promptsApart: storeBlocks !== undefined,
    hostBlocks: Math.floor(hostBytes / layerBytes),
    maxRequests,
    maxBatchTokens: maxRequests + promptTokens,
    maxInjectTokens: promptTokens * layers,
    // An engine cuts prompts where its runner does.
    chunkTokens: storeBlocks === undefined ? Math.min(512, promptTokens) : promptTokens,
  });
}

/**
 * Serves a trace on a clock of its own, with the scheduler that an engine has. The same options give the same result.
 * @throws InvalidValueError; OutOfMemoryError for requests that the model's memory could never hold; the signal's reason
 */
export async function simulate(options: SimulationOptions): Promise<SimulationResult> {
  expectSimulation(options);
  const { model, features, costs = new Costs(), seed = 1, locality, signal } = options;
  const trace = listOf('simulate', 'trace', options.trace, mostRequests);
  expectInOrder(trace);
  const scheduler = schedulerOf(options);
  const executor = new SimulatedExecutor({ model, features, scheduler, costs, seed, locality });
  const times = new Map<ScheduledRequest, Times>();
  let arrived = 0;
  for (;;) {
    for (let next = trace[arrived]; next && next.milliseconds <= executor.now; next = trace[++arrived]) {
      times.set(submit(scheduler, next, arrived), { arrival: next.milliseconds, tokens: [] });
    }
    const batch = scheduler.next();
    if (batch === undefined) {
      const next = trace[arrived];
      if (next === undefined) break;
      executor.now = next.milliseconds;
      continue;
    }
    const begun = executor.now;
    for (const { request } of batch.prompts) {
      const time = times.get(request);
      if (time) time.begun ??= begun;
    }
    if (executor.steps % stepsInTurn === 0) {
      await setImmediate();
      signal?.throwIfAborted();
    }
    const step = await executor.compute(batch);
    for (const { request } of await step.choose()) {
      times.get(request)?.tokens.push(executor.now);
      if (request.state !== 'answered') continue;
      scheduler.end(request);
      executor.release(request);
    }
  }
  return summarise([...times.entries()], executor);
}

/** @throws OutOfMemoryError that says which request of the trace could never be served */
function submit(scheduler: Scheduler, request: TracedRequest, index: number): ScheduledRequest {
  try {
    return scheduler.submit(request);
  } catch (cause) {
    if (!(cause instanceof OutOfMemoryError)) throw cause;
    const { promptTokens, maxTokens } = request;
    throw new OutOfMemoryError(
      `Request ${index + 1} of the trace has ${promptTokens} tokens and an answer of ${maxTokens}, which the model's memory could never hold: ` +
        `in blocks of one layer it takes ${String(cause.wanted)} of ${String(cause.given)}. Leave it out, or take another model.`,
      { subject: 'trace', given: index + 1, cause },
    );
  }
}

/** What the scheduler does not check. @throws InvalidValueError */
function expectSimulation(options: SimulationOptions): void {
  expectOptions('simulate', options, {
    ...{ model: true, features: true, trace: true, costs: true, locality: true, seed: true },
    ...{ maxRequests: true, promptTokens: true, storeBlocks: true, signal: true },
  });
  const { model, features, costs, locality, storeBlocks, signal, seed = 1 } = options;
  expectObject('simulate', 'model', model);
  expectObject('simulate', 'features', features);
  const { deviceBytes, hostBytes, queryHeads, parameters } = model;
  for (const [name, given] of Object.entries({ deviceBytes, hostBytes, queryHeads, parameters })) {
    expectThat('simulate', name, given, Number.isSafeInteger(given) && given > 0, 'a positive whole number');
  }
  expectThat('simulate', 'fastTransfer', features.fastTransfer, typeof features.fastTransfer === 'boolean', 'true or false');
  expectThat('simulate', 'costs', costs, costs === undefined || Costs.is(costs), 'new Costs()');
  if (locality !== undefined) expectLocality(locality);
  const isCount = storeBlocks === undefined || (Number.isSafeInteger(storeBlocks) && storeBlocks > 0 && features.offload);
  expectThat('simulate', 'storeBlocks', storeBlocks, isCount, 'a positive whole number, and that only with offload');
  expectThat('simulate', 'seed', seed, Number.isSafeInteger(seed) && seed >= 0, 'a whole number from 0 on');
  expectSignal('simulate', signal);
}

/** @throws InvalidValueError */
function expectLocality(locality: Locality): void {
  expectObject('simulate', 'locality', locality);
  const { replaced, returning, awaySteps, exponent } = locality;
  expectThat('simulate', 'replaced', replaced, replaced > 0 && replaced <= 1, 'above 0, at most 1');
  expectThat('simulate', 'returning', returning, returning >= 0 && returning <= 1, 'from 0 to 1');
  expectThat('simulate', 'awaySteps', awaySteps, awaySteps > 0 && awaySteps < Infinity, 'above 0, finite');
  expectThat('simulate', 'exponent', exponent, exponent >= 0 && exponent < Infinity, 'from 0 on, finite');
}

/** @throws InvalidValueError unless each request has a time, and none comes before another that is listed earlier */
function expectInOrder(trace: readonly TracedRequest[]): void {
  let last = 0;
  for (const request of trace) {
    expectObject('simulate', 'trace', request);
    const { milliseconds } = request;
    expectThat('simulate', 'milliseconds', milliseconds, milliseconds >= last && milliseconds < Infinity, `finite, from ${last} on`);
    last = milliseconds;
  }
}

function summarise(served: readonly (readonly [ScheduledRequest, Times])[], { now, steps, loads, answers, answering, spent }: SimulatedExecutor): SimulationResult {
  const all = served.map(([, times]) => times);
  const gaps = all.flatMap(({ tokens }) => tokens.slice(1).map((time, index) => time - (tokens[index] ?? time)));
  gaps.sort((one, other) => one - other);
  const tokens = all.reduce((sum, each) => sum + each.tokens.length, 0);
  const start = all[0]?.arrival ?? 0;
  return {
    requests: all.length,
    firstToken: mean(all.map((each) => (each.tokens[0] ?? NaN) - each.arrival)),
    queueing: mean(all.map(({ begun = NaN, arrival }) => begun - arrival)),
    betweenTokens: mean(gaps),
    betweenTokens50: gaps[Math.floor(0.5 * (gaps.length - 1))] ?? 0,
    betweenTokens99: gaps[Math.floor(0.99 * (gaps.length - 1))] ?? 0,
    tokensPerSecond: (1000 * tokens) / (now - start),
    loadsPerStep: loads / Math.max(1, steps),
    steps,
    answersPerStep: answers / Math.max(1, answering),
    spent,
    resets: served.reduce((sum, [{ resets }]) => sum + resets, 0),
  };
}

function mean(numbers: readonly number[]): number {
  return numbers.length === 0 ? 0 : numbers.reduce((sum, each) => sum + each, 0) / numbers.length;
}
