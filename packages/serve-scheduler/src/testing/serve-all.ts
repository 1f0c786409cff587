import { Random } from '@kv/sparse-core/testing';

import type { Batch } from '../scheduler/batch.js';
import type { ScheduledRequest } from '../scheduler/request.js';
import type { Scheduler } from '../scheduler/scheduler.js';

/** What a plain reading of the batches says of a request. */
interface Progress {
  /** Tokens of the prompt that passed each layer. */
  layers: number[];
  fed: number;
}

/** Follows a scheduler's batches, and throws where one breaks what they promise. */
export class BatchChecker {
  readonly #scheduler: Scheduler;
  readonly #progress = new Map<ScheduledRequest, Progress>();
  steps = 0;
  restarts = 0;
  lowered = 0;

  constructor(scheduler: Scheduler) {
    this.#scheduler = scheduler;
  }

  check(batch: Batch): void {
    const { settings } = this.#scheduler;
    const { model, maxRequests, maxBatchTokens, maxInjectTokens, deviceBlocks, hostBlocks } = settings;
    this.steps += 1;
    this.restarts += batch.restarted.length;
    for (const request of batch.restarted) this.#progress.delete(request);
    let inject = 0;
    for (const { request, firstToken, endToken, firstLayer, endLayer, isLast } of batch.prompts) {
      const { layers } = this.#of(request);
      for (let layer = firstLayer; layer < endLayer; layer++) {
        expectSame('tokens that passed the layer', layers[layer] ?? request.reusedTokens, firstToken);
        if (layer > 0) expectMost('tokens of the layer before', endToken, layers[layer - 1] ?? 0);
        layers[layer] = endToken;
      }
      inject += (endToken - firstToken) * (endLayer - firstLayer);
      expectSame('the last part', isLast, layers.length === model.layers && layers.at(-1) === request.promptTokens);
    }
    for (const { request, fed, budgetTokens: budget } of batch.answers) {
      const progress = this.#of(request);
      expectSame('a whole prompt', progress.layers.length, model.layers);
      expectSame('fed', fed, progress.fed);
      progress.fed += 1;
      expectMost('a budget', budget, request.budgetTokens);
      if (budget === request.budgetTokens) continue;
      this.lowered += 1;
      expectSame('the answer that goes first', batch.answers[0]?.request, request);
    }
    const served = new Set([...batch.prompts, ...batch.answers].map(({ request }) => request));
    expectSame('requests that appear once', served.size, batch.prompts.length + batch.answers.length);
    expectMost('M_avl', batch.deviceBlocks, deviceBlocks);
    expectMost('M_avl between steps', this.#scheduler.heldDeviceBlocks, deviceBlocks);
    expectMost('host memory', this.#scheduler.heldHostBlocks, hostBlocks);
    expectMost('R_max', served.size, maxRequests);
    expectMost('maxInjectTokens', inject, maxInjectTokens);
    expectMost('T_max', inject / model.layers + batch.answers.length, maxBatchTokens);
  }

  #of(request: ScheduledRequest): Progress {
    const progress = this.#progress.get(request) ?? { layers: [], fed: 0 };
    this.#progress.set(request, progress);
    return progress;
  }
}

/** Runs what is submitted to its end. Requests whose answers are complete end a step later, as a device that is behind has it. */
export function serveAll(
  scheduler: Scheduler,
  requests: readonly ScheduledRequest[],
  checker = new BatchChecker(scheduler),
  random = new Random(1),
): BatchChecker {
  const mostSteps = checker.steps + 20_000;
  while (requests.some(({ state }) => state !== 'ended')) {
    const complete = requests.filter(({ state }) => state === 'answered');
    const batch = scheduler.next();
    if (batch !== undefined) checker.check(batch);
    else if (complete.length === 0) throw new Error('nothing is computed, and requests wait');
    for (const { request } of batch?.answers ?? []) observeSome(scheduler, request, random);
    for (const request of complete) scheduler.end(request);
    if (checker.steps > mostSteps) throw new Error('some are never served');
  }
  return checker;
}

/** A working set somewhere between what a step reads and twelve times that. */
export function observeSome(scheduler: Scheduler, request: ScheduledRequest, random: Random): void {
  const { model, blockTokens } = scheduler.settings;
  const read = Math.min(request.length, request.budgetTokens) / blockTokens;
  scheduler.observe(request, Math.ceil(read * model.kvHeads * (1 + 11 * random.next() ** 3)));
}

function expectSame(what: string, given: unknown, wanted: unknown): void {
  if (given !== wanted) throw new Error(`${what}: ${String(given)}, and ${String(wanted)} is wanted`);
}

function expectMost(what: string, given: number, most: number): void {
  if (!(given <= most)) throw new Error(`${what}: ${given}, and at most ${most} is wanted`);
}
