import { DisposedError } from '@kv/sparse-core';
import { expectObject } from '@kv/sparse-core/native';
import { type GeneratedId, Runner, type RunnerModel } from '@kv/model';

import type { ScheduledRequest } from '../scheduler/request.js';
import type { Scheduler } from '../scheduler/scheduler.js';
import { Answer } from './answer.js';
import { asError } from './as-error.js';
import { defaultSequences, readRequest, schedulerOf } from './engine-options.js';
import type { EngineOptions, EngineRequest, EngineRequestOptions } from './engine-options.js';
import type { Outcome, Step } from './executor.js';
import { RunnerExecutor } from './runner-executor.js';

interface Served extends EngineRequest {
  readonly prompt: Int32Array;
  readonly answer: Answer;
  /** Stops listening to its signal. */
  readonly unlisten: () => void;
}

/**
 * Serves many requests at once: each step gives every answer a token and reads some more of the prompts that wait. A step is
 * enqueued before the tokens of the one before are known, so that the device never waits for this thread.
 */
export class Engine {
  readonly #model: RunnerModel;
  readonly #options: EngineOptions;
  readonly #scheduler: Scheduler;
  readonly #served = new Map<ScheduledRequest, Served>();
  /** Requests that nobody wants any more, until the step that is being enqueued is. */
  readonly #unwanted = new Set<ScheduledRequest>();
  readonly #end: Promise<void>;
  #runner: Runner;
  #executor: RunnerExecutor;
  #wake: (() => void) | undefined;
  /** Why it takes no requests. */
  #closed: Error | undefined;

  /** @throws OutOfMemoryError when cache and working memory do not fit; InvalidValueError, CapabilityError */
  constructor(model: RunnerModel, options: EngineOptions = {}) {
    expectObject('createEngine', 'options', options);
    this.#model = model;
    this.#options = { ...options, sequences: options.sequences ?? defaultSequences };
    this.#runner = new Runner(model, this.#options);
    try {
      this.#scheduler = schedulerOf(this.#runner, this.#options);
      this.#executor = new RunnerExecutor(this.#runner, this.#scheduler.settings.maxRequests);
    } catch (error) {
      this.#runner.dispose();
      throw error;
    }
    this.#end = this.#serve();
  }

  /** The runner that computes now: another one after a failure. */
  get runner(): Runner {
    return this.#runner;
  }

  /** Requests that are served now, and that wait. */
  get load(): { readonly underWay: number; readonly waiting: number } {
    return { underWay: this.#scheduler.underWay, waiting: this.#scheduler.waiting };
  }

  /**
   * Puts a request at the end of the queue.
   * @returns its tokens as they are chosen. To leave the loop, or to abort, gives back its memory within a step
   * @throws InvalidValueError for an empty or over-long prompt, ids outside the vocabulary, bad settings; OutOfMemoryError when
   *   the cache has no room for it alone; DisposedError when the engine is closed; the signal's reason when it is aborted
   */
  generateTokens(prompt: ArrayLike<number>, options: EngineRequestOptions = {}): AsyncIterableIterator<GeneratedId> {
    this.#expectOpen();
    const ids = this.#runner.checkTokens('new', prompt);
    const settings = readRequest(this.#runner, ids.length, options);
    const { signal, maxTokens } = settings;
    signal?.throwIfAborted();
    const request = this.#scheduler.submit({ promptTokens: ids.length, maxTokens });
    const answer = new Answer(() => {
      this.#leave(request);
    });
    const onAbort = (): void => {
      answer.fail(asError(signal?.reason));
      this.#leave(request);
    };
    signal?.addEventListener('abort', onAbort, { once: true });
    const unlisten = (): void => signal?.removeEventListener('abort', onAbort);
    this.#served.set(request, { ...settings, prompt: ids, answer, unlisten });
    this.#executor.add(request, { ...settings, prompt: ids });
    this.#wake?.();
    return answer;
  }

  /** Ends all requests with a DisposedError and gives back all memory. */
  async close(): Promise<void> {
    this.#closed ??= new DisposedError('The engine was closed; create another.', { subject: 'engine' });
    this.#wake?.();
    await this.#end;
  }

  async #serve(): Promise<void> {
    let choosing: Promise<readonly Outcome[]> | undefined;
    let step: Step | undefined;
    while (this.#closed === undefined) {
      for (const request of this.#unwanted) this.#finish(request);
      const batch = this.#scheduler.next();
      if (batch === undefined && choosing === undefined) {
        await this.#called();
        continue;
      }
      try {
        step = batch && (await this.#executor.compute(batch));
        if (choosing) this.#deliver(await choosing);
        choosing = step?.choose();
        choosing?.catch(() => undefined);
      } catch (error) {
        step?.[Symbol.dispose]();
        choosing = undefined;
        this.#recover(asError(error));
      }
      step = undefined;
    }
    await choosing?.catch(() => undefined);
    this.#shut(this.#closed);
  }

  /** Comes true when there may be something to do. */
  async #called(): Promise<void> {
    await new Promise<void>((resolve) => {
      this.#wake = resolve;
    });
    this.#wake = undefined;
  }

  #deliver(outcomes: readonly Outcome[]): void {
    for (const outcome of outcomes) {
      const { request } = outcome;
      const served = this.#served.get(request);
      // A step is computed in vain behind the end of an answer.
      if (served === undefined) continue;
      const { answer, endIds, maxTokens } = served;
      if (outcome.failure) {
        answer.fail(outcome.failure);
        this.#finish(request);
        continue;
      }
      const finishReason = endIds.includes(outcome.id) ? 'end' : answer.count + 1 === maxTokens ? 'length' : null;
      answer.push(outcome.id, finishReason);
      if (finishReason !== null) this.#finish(request);
    }
  }

  /** The requests under way have lost what was computed of them. Those that wait have lost nothing. */
  #recover(failure: Error): void {
    for (const [request, { answer }] of this.#served) {
      if (request.state === 'waiting') continue;
      answer.fail(failure);
      this.#finish(request);
    }
    this.#executor[Symbol.dispose]();
    this.#runner.dispose();
    try {
      this.#runner = new Runner(this.#model, this.#options);
      this.#executor = new RunnerExecutor(this.#runner, this.#scheduler.settings.maxRequests);
      for (const [request, served] of this.#served) this.#executor.add(request, served);
    } catch (error) {
      const cause = asError(error);
      this.#closed = new DisposedError(`The engine was ended by an error (${cause.message}).`, { subject: 'engine', cause });
    }
  }

  /** Nobody wants the request: the step that may be on its way is not cut off. */
  #leave(request: ScheduledRequest): void {
    if (!this.#served.has(request)) return;
    this.#unwanted.add(request);
    this.#wake?.();
  }

  #finish(request: ScheduledRequest): void {
    this.#served.get(request)?.unlisten();
    this.#served.delete(request);
    this.#unwanted.delete(request);
    this.#scheduler.end(request);
    this.#executor.release(request);
  }

  #shut(reason: Error): void {
    for (const [request, { answer }] of this.#served) {
      answer.fail(reason);
      this.#finish(request);
    }
    this.#executor[Symbol.dispose]();
    this.#runner.dispose();
  }

  #expectOpen(): void {
    if (this.#closed) throw this.#closed;
  }
}

/**
 * An engine that serves requests of a model, with a runner and a cache of its own.
 * @throws OutOfMemoryError when cache and working memory do not fit; InvalidValueError, CapabilityError
 */
export function createEngine(model: RunnerModel, options: EngineOptions = {}): Engine {
  return new Engine(model, options);
}
