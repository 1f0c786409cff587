import { setTimeout } from 'node:timers/promises';

import { DisposedError, OutOfMemoryError } from '@kv/sparse-core';
import { expectOptions, expectThat, whenAborted } from '@kv/sparse-core/native';
import { StopMatcher, Tokenizer, withTexts } from '@kv/model';
import type { GeneratedId, GeneratedToken, Runner, RunnerModel } from '@kv/model';

import type { Batch } from '../scheduler/batch.js';
import type { ScheduledRequest } from '../scheduler/request.js';
import type { Scheduler } from '../scheduler/scheduler.js';
import { Answer } from './answer.js';
import { endedBy, originOf } from './as-error.js';
import { createRunner, keptGrid, readOptions, schedulerOf } from './engine-options.js';
import type { EngineOptions, EngineSettings } from './engine-options.js';
import { readRequest, requestOptions } from './engine-request.js';
import type { EngineRequest, EngineRequestOptions, EngineTextOptions } from './engine-request.js';
import { stepsObserved } from './executor.js';
import type { Outcome, Step } from './executor.js';
import { RunnerExecutor } from './runner-executor.js';

interface Served extends EngineRequest {
  readonly prompt: Int32Array;
  readonly answer: Answer;
  /** Stops listening to its signal. */
  readonly unlisten: () => void;
}

export interface EngineStats {
  readonly steps: number;
  /** Steps whose answers were computed in several, since the cache had no room for what all of them read. */
  readonly split: number;
  /** Blocks of a kv head in a layer that answers read, of a store over two memories, as far as the device has told: it is asked now and then. */
  readonly blocksFound: number;
  /** The same that had to come from host memory. */
  readonly blocksLoaded: number;
  /** How often requests lost their memory, and were read again. */
  readonly restarts: number;
  /** Tokens of prompts that were not read, because kept ones began with the same. */
  readonly reusedTokens: number;
}

/**
 * Serves many requests at once: each step gives every answer a token and reads some more of the prompts that wait. A step is
 * enqueued before the tokens of the one before are known, so that the device never waits for this thread.
 */
export class Engine {
  readonly #model: RunnerModel;
  readonly #settings: EngineSettings;
  readonly #scheduler: Scheduler;
  readonly #served = new Map<ScheduledRequest, Served>();
  /** Requests that nobody wants any more, until the step that is being enqueued is. */
  readonly #unwanted = new Set<ScheduledRequest>();
  readonly #end: Promise<void>;
  #runner: Runner;
  #executor: RunnerExecutor;
  #wake: (() => void) | undefined;
  #steps = 0;
  #restarts = 0;
  /** Of executors that are no more. */
  #split = 0;
  readonly #blocks = { found: 0, loaded: 0 };
  #reusedTokens = 0;
  /** Why it takes no requests. */
  #closed: Error | undefined;

  /** @throws what `createEngine` throws */
  constructor(model: RunnerModel, options: EngineOptions = {}) {
    this.#model = model;
    this.#settings = readOptions(model, options);
    this.#runner = createRunner(model, this.#settings);
    try {
      this.#scheduler = schedulerOf(this.#runner, this.#settings, (request) => this.#reuse(request));
      this.#executor = this.#createExecutor();
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
    if (this.#closed) return { underWay: 0, waiting: 0 };
    return { underWay: this.#scheduler.underWay, waiting: this.#scheduler.waiting };
  }

  /** What it has done so far. */
  get stats(): EngineStats {
    const { split, blocks } = this.#executor;
    const read = { blocksFound: this.#blocks.found + blocks.found, blocksLoaded: this.#blocks.loaded + blocks.loaded };
    return { steps: this.#steps, split: this.#split + split, ...read, restarts: this.#restarts, reusedTokens: this.#reusedTokens };
  }

  /**
   * Puts a request at the end of the queue.
   * @param prompt token ids `[token]`, from 1 to `contextTokens` of them, which are copied
   * @returns its tokens as they are chosen. To leave the loop, or to abort, gives back its memory within a step. Behind the tokens
   *   that were chosen the loop throws what ended the request early: the signal's reason; InvalidValueError when its scores are
   *   NaN or infinite; OutOfMemoryError when a device lacked room that the scheduler does not count; what its selection threw;
   *   what failed the stream of its step; DisposedError when the engine was closed
   * @throws InvalidValueError for an empty or over-long prompt, ids outside the vocabulary, bad settings; OutOfMemoryError when
   *   the cache has no room for it alone; CapabilityError for a budget or a selection that the policy does not serve, or a text
   *   longer than the model's sliding window; DisposedError when the engine is closed; the signal's reason when it is aborted
   */
  generateTokens(prompt: ArrayLike<number>, options: EngineRequestOptions = {}): AsyncIterableIterator<GeneratedId> {
    this.#expectOpen();
    const ids = this.#runner.checkTokens('new', prompt);
    const settings = readRequest(this.#runner, ids.length, options);
    const { signal, maxTokens, budgetTokens } = settings;
    signal?.throwIfAborted();
    const request = this.#scheduler.submit({ promptTokens: ids.length, maxTokens, budgetTokens });
    const answer = new Answer(() => {
      this.#leave(request);
    });
    const unlisten = whenAborted(signal, () => {
      answer.fail(signal?.reason as Error);
      this.#leave(request);
    });
    this.#served.set(request, { ...settings, prompt: ids, answer, unlisten });
    this.#executor.add(request, { ...settings, prompt: ids });
    this.#wake?.();
    return answer;
  }

  /**
   * Answers a prompt with texts, which taken together are the answer. The request comes to the queue when its first token is
   * asked for.
   * @param prompt a text, tokenized with the special tokens that the model wants, or token ids
   * @throws InvalidValueError for an empty stop string; what `generateTokens` throws
   */
  async *generate(tokenizer: Tokenizer, prompt: string | ArrayLike<number>, options: EngineTextOptions = {}): AsyncGenerator<GeneratedToken, void> {
    expectThat('generate', 'tokenizer', tokenizer, Tokenizer.is(tokenizer), 'the tokenizer of a model');
    expectOptions('generate', options, { ...requestOptions, stop: true });
    const { stop = [], ...others } = options;
    const { signal } = others;
    const matcher = new StopMatcher(stop);
    this.#expectOpen();
    const ids = typeof prompt === 'string' ? await tokenizer.encode(prompt, { signal }) : this.#runner.checkTokens('new', prompt);
    yield* withTexts(tokenizer, ids, this.generateTokens(ids, others), matcher);
  }

  /**
   * Takes memory from a request that is under way, for others. It goes on, with the same tokens, when there is room again.
   * @param answer what `generateTokens` gave
   * @param memory 'device': what host memory holds too, which comes back when it is read; 'all': the prompt is read again and
   *   the answer fed again, when it is its turn
   * @throws CapabilityError for 'device' with a store that holds nothing in host memory; InvalidValueError
   */
  preempt(answer: AsyncIterableIterator<GeneratedId>, memory: 'device' | 'all'): void {
    this.#expectOpen();
    expectThat('preempt', 'answer', answer, answer instanceof Answer, 'of generateTokens()');
    expectThat('preempt', 'memory', memory, ['device', 'all'].includes(memory), "'device' or 'all'");
    for (const [request, served] of this.#served) {
      if (served.answer !== answer) continue;
      if (memory === 'device') this.#executor.evict(request);
      else this.#scheduler.preempt(request);
    }
  }

  /**
   * Ends all requests with a DisposedError and gives back all memory. That of a host pool goes back when the device is done
   * with it, which may be a moment later.
   */
  async close(): Promise<void> {
    this.#closed ??= new DisposedError('The engine was closed; create another.', { subject: 'engine' });
    this.#wake?.();
    await this.#end;
  }

  async #serve(): Promise<void> {
    try {
      await this.#computeSteps();
    } catch (error) {
      // Counts of requests and blocks may be wrong by now: nobody can be served any more.
      this.#closed ??= endedBy(error);
    }
    this.#shut();
  }

  /** Until it is closed. */
  async #computeSteps(): Promise<void> {
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
        if (batch) this.#observe(batch);
        step = batch && (await this.#executor.compute(batch));
        if (choosing) this.#deliver(await choosing);
        choosing = step?.choose();
        choosing?.catch(() => undefined);
      } catch (error) {
        step?.[Symbol.dispose]();
        choosing = undefined;
        await this.#recover(originOf(error));
      }
      step = undefined;
    }
    await choosing?.catch(() => undefined);
  }

  /** Comes true when there may be something to do. */
  async #called(): Promise<void> {
    await new Promise<void>((resolve) => {
      this.#wake = resolve;
    });
    this.#wake = undefined;
  }

  /** Counts a step. */
  #observe({ answers, restarted }: Batch): void {
    this.#steps += 1;
    this.#restarts += restarted.length;
    if (this.#runner.residency === undefined || this.#steps % stepsObserved > 0) return;
    for (const { request } of answers) {
      const workingSet = this.#executor.workingSet(request);
      if (workingSet !== undefined) this.#scheduler.observe(request, workingSet);
    }
  }

  #reuse(request: ScheduledRequest): number {
    const tokens = this.#executor.findPrefix(request);
    this.#reusedTokens += tokens;
    return tokens;
  }

  #createExecutor(): RunnerExecutor {
    return new RunnerExecutor(this.#runner, { ...this.#settings, grid: keptGrid(this.#runner) });
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
  async #recover(failure: Error): Promise<void> {
    for (const [request, { answer }] of this.#served) {
      if (request.state === 'waiting') continue;
      answer.fail(failure);
      this.#finish(request);
    }
    this.#split += this.#executor.split;
    this.#blocks.found += this.#executor.blocks.found;
    this.#blocks.loaded += this.#executor.blocks.loaded;
    this.#executor[Symbol.dispose]();
    this.#runner.dispose();
    try {
      this.#runner = await this.#createAnother();
      this.#executor = this.#createExecutor();
      for (const [request, served] of this.#served) this.#executor.add(request, served);
    } catch (error) {
      this.#closed = endedBy(error);
    }
  }

  /** Host memory of the runner before goes back when the device is done with it, which may be a moment later. */
  async #createAnother(): Promise<Runner> {
    for (const milliseconds of [1, 10, 100, 1000]) {
      try {
        return createRunner(this.#model, this.#settings);
      } catch (error) {
        if (!(error instanceof OutOfMemoryError)) throw error;
        await setTimeout(milliseconds);
      }
    }
    return createRunner(this.#model, this.#settings);
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

  /** Asks nothing of the scheduler, which may be what failed. */
  #shut(): void {
    for (const { answer, unlisten } of this.#served.values()) {
      unlisten();
      if (this.#closed) answer.fail(this.#closed);
    }
    this.#served.clear();
    this.#executor[Symbol.dispose]();
    this.#runner.dispose();
  }

  #expectOpen(): void {
    if (this.#closed) throw this.#closed;
  }
}

/**
 * An engine that serves requests of a model, with a runner and a cache of its own. All memory that it will need is taken now,
 * except for the rows of prompts and what a step chooses from.
 * @throws InvalidValueError for an option of the wrong kind, a count that is not whole or out of its range, or counts that leave no
 *   room for a chunk of a prompt beside all answers; `subject` of an error is the option's name
 * @throws OutOfMemoryError when cache and working memory do not fit the device, or a policy's host pool was made for fewer sequences
 *   than `sequences + keptPrompts`
 * @throws CapabilityError that names the part of the policy that cannot serve: a prefill attention over a store that it cannot
 *   read, a store without `answersApart` for `deterministic`, a part that makes something else of a prompt for `keptPrompts`
 * @throws DisposedError when the model was disposed of
 */
export function createEngine(model: RunnerModel, options: EngineOptions = {}): Engine {
  return new Engine(model, options);
}
