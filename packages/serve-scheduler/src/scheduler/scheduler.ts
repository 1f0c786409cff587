import { InvalidValueError, OutOfMemoryError } from '@kv/sparse-core';
import { expectObject, expectThat } from '@kv/sparse-core/native';

import type { AnswerStep, Batch, PromptPart } from './batch.js';
import { BlockCounts } from './block-counts.js';
import { BlockManager } from './block-manager.js';
import { nextPart, tokenLayers } from './next-part.js';
import { Request } from './request.js';
import { RequestQueues } from './request-queues.js';
import type { RequestSize, ScheduledRequest } from './request.js';
import { expectCount, expectLeast, leastBudget, readSettings } from './scheduler-options.js';
import type { SchedulerOptions, Settings } from './scheduler-options.js';
import { WorkingSets } from './working-sets.js';

/** A request that was left out so often goes first. */
const mostResets = 64;

/** What a step still has room for. */
interface Room {
  /** M_avl − M_used, in blocks of one layer. */
  blocks: number;
  /** T_max − tokens. */
  tokens: number;
  /** Tokens × layers of prompts. */
  inject: number;
  /** Whether requests may begin: not behind one that has to have the next free memory. */
  begins: boolean;
}

/**
 * Decides which requests are computed in the next step: first come, first served, under R_max, T_max and M_avl (Algorithm 1 of
 * SparseServe). Nothing is computed here, and nothing waits: an executor computes the batches in their order.
 */
export class Scheduler {
  readonly settings: Settings;
  readonly #counts: BlockCounts;
  readonly #blocks: BlockManager<Request>;
  readonly #workingSets: WorkingSets;
  readonly #queues = new RequestQueues();
  readonly #own = new WeakSet<Request>();
  /** Those whose memory the next batch gives back. */
  readonly #restarted = new Set<Request>();
  #arrivals = 0;

  /** @throws InvalidValueError; OutOfMemoryError when M_avl has no room for the smallest budget */
  constructor(options: SchedulerOptions) {
    this.settings = readSettings(options);
    const { hostBlocks, model, deviceBlocks } = this.settings;
    this.#counts = new BlockCounts(this.settings);
    this.#blocks = new BlockManager(Math.floor(hostBlocks / model.kvHeads));
    this.#workingSets = new WorkingSets(this.#counts);
    if (this.#counts.least > deviceBlocks) throw tooSmall('deviceBlocks', deviceBlocks, this.#counts.least, 'the smallest budget');
  }

  /** Requests that nothing is in memory of. */
  get waiting(): number {
    return this.#queues.waiting.length;
  }

  /** Requests that hold memory. */
  get underWay(): number {
    return this.#queues.underWay.length;
  }

  /** Blocks of one layer that are held on the device between steps. */
  get heldDeviceBlocks(): number {
    return this.#blocks.device;
  }

  /** Blocks of one layer that are held in host memory. */
  get heldHostBlocks(): number {
    return this.#blocks.host * this.settings.model.kvHeads;
  }

  /**
   * Puts a request at the end of the queue.
   * @throws InvalidValueError; OutOfMemoryError when it would not fit if it were alone
   */
  submit(size: RequestSize): ScheduledRequest {
    expectObject('submit', 'size', size);
    const { promptTokens, maxTokens, budgetTokens = this.settings.budgetTokens } = size;
    expectCount('promptTokens', promptTokens, 1);
    expectCount('maxTokens', maxTokens, 1);
    this.#expectBudget(budgetTokens);
    const { deviceBlocks, hostBlocks, features } = this.settings;
    const request = new Request(this.#arrivals, { promptTokens, maxTokens, budgetTokens });
    const all = promptTokens + maxTokens;
    const device = this.#counts.held(all, promptTokens, true) + this.#counts.least;
    const whole = `${promptTokens} tokens and ${maxTokens} of an answer`;
    if (device > deviceBlocks) throw tooSmall('deviceBlocks', deviceBlocks, device, features.offload ? `a prompt of ${promptTokens} tokens` : whole);
    const host = features.offload ? this.#counts.ofTokens(all) : 0;
    if (host > hostBlocks) throw tooSmall('hostBlocks', hostBlocks, host, whole);
    this.#arrivals += 1;
    this.#queues.waiting.push(request);
    this.#own.add(request);
    return request;
  }

  /**
   * The next step, counted as computed. Undefined when there is nothing to compute: no requests, or only some whose answers
   * are complete and that were not ended.
   */
  next(): Batch | undefined {
    this.#growAnswers();
    for (;;) {
      const batch = this.#batch();
      if (batch !== undefined) return batch;
      // Nobody would leave room while 64 steps pass.
      const first = this.#queues.candidates(this.settings.maxRequests).find(({ promoted, resets }) => !promoted && resets > 0);
      if (first === undefined) return undefined;
      this.#queues.promote(first);
    }
  }

  /** Says how many blocks of one layer the last steps of a request read beside pinned ones, each counted once: the most of all layers. */
  observe(given: ScheduledRequest, workingSet: number): void {
    const request = this.#expectOwn(given);
    expectCount('workingSet', workingSet, 0);
    if (request.length > 0) this.#workingSets.observe(request, workingSet);
  }

  /**
   * Takes all memory from a request that is under way: it waits again, its prompt is read and its answer fed once more. What has
   * all its tokens, or nothing in memory, stays as it is.
   */
  preempt(given: ScheduledRequest): void {
    const request = this.#expectOwn(given);
    if (request.state === 'reading' || request.state === 'answering') this.#restart(request);
  }

  /** Takes a request out, whatever its state, and gives back its memory. */
  end(given: ScheduledRequest): void {
    const request = this.#expectOwn(given);
    if (request.state === 'ended') return;
    request.state = 'ended';
    this.#blocks.release(request);
    this.#queues.end(request);
    this.#restarted.delete(request);
  }

  /** Algorithm 1, lines 6 to 15. */
  #batch(): Batch | undefined {
    const answers: AnswerStep[] = [];
    const prompts: PromptPart[] = [];
    const chosen = this.#queues.candidates(this.settings.maxRequests);
    const room = this.#room(chosen);
    const isReading = chosen.some(({ state }) => state === 'reading');
    // Of this whole batch: when its last token is computed, another one would be the first.
    const { firstAnswer } = this.#queues;
    for (const request of chosen) {
      if (request.state === 'answering') {
        const step = this.#answer(request, room, !isReading && request === firstAnswer);
        if (step === undefined) this.#reset(request, room);
        else answers.push(step);
      } else {
        const part = this.#prompt(request, room);
        if (part !== undefined) prompts.push(part);
      }
    }
    if (answers.length + prompts.length === 0) return undefined;
    const restarted = [...this.#restarted];
    this.#restarted.clear();
    return { answers, prompts, restarted, deviceBlocks: this.settings.deviceBlocks - room.blocks };
  }

  /** Lines 1 to 3, and 7: what is held between steps is used whoever is chosen. Every answer has its token. */
  #room(chosen: readonly Request[]): Room {
    const { deviceBlocks, maxBatchTokens, maxInjectTokens } = this.settings;
    const answers = chosen.filter(({ state }) => state === 'answering').length;
    const blocks = deviceBlocks - this.#blocks.device;
    return { blocks, tokens: maxBatchTokens - answers, inject: maxInjectTokens, begins: true };
  }

  /**
   * Lines 9 to 12 for an answer. Undefined when it does not fit.
   * @param goesAlone whether it has the whole device, so that what does not fit now never will
   */
  #answer(request: Request, room: Room, goesAlone: boolean): AnswerStep | undefined {
    const { features } = this.settings;
    const { budgetTokens } = request;
    const read = this.#counts.read(request.length + 1, budgetTokens);
    // Without control the cache is everybody's: what does not fit is loaded again.
    const needed = features.workingSetControl ? this.#workingSets.estimate(request) : 0;
    let budget = budgetTokens;
    if (needed <= room.blocks) {
      room.blocks -= needed;
    } else {
      if (!goesAlone) return undefined;
      // Prompts no longer hold anything: its budget is lowered to what is left, or it would never go.
      if (read > room.blocks) budget = this.#counts.budgetOf(room.blocks);
      room.blocks = 0;
    }
    const step = { request, budgetTokens: budget, fed: request.fed, isReplay: request.fed + 1 < request.answered };
    request.answer();
    return step;
  }

  /** Lines 9 to 12 for a prompt, which holds the same from its first part to its last. Undefined when it does not fit. */
  #prompt(request: Request, room: Room): PromptPart | undefined {
    const { layers } = this.settings.model;
    const most = Math.min(room.inject, room.tokens * layers);
    if (request.state === 'waiting') {
      if (nextPart(request, this.settings, most) === undefined) room.begins = false;
      if (!room.begins || !this.#begin(request, room)) return undefined;
    }
    const part = nextPart(request, this.settings, most);
    if (part === undefined) return undefined;
    const computed = tokenLayers(part);
    room.inject -= computed;
    room.tokens -= Math.ceil(computed / layers);
    const isRowsEnd = part.endToken === request.promptTokens;
    request.nextToken = isRowsEnd ? request.reusedTokens : part.endToken;
    request.nextLayer = isRowsEnd && !part.isLast ? part.endLayer : part.firstLayer;
    if (part.isLast) {
      request.finishPrompt();
      this.#hold(request);
    }
    return part;
  }

  /** Takes a request out of the queue, if there is memory for it. */
  #begin(request: Request, room: Room): boolean {
    const { features, deviceBlocks, reservedAnswerTokens } = this.settings;
    const { promptTokens, maxTokens } = request;
    const held = this.#counts.held(promptTokens + maxTokens, promptTokens, true);
    // Whoever is under way, the smallest budget of one has room beside what all hold.
    const left = deviceBlocks - this.#blocks.device - held;
    if (held > room.blocks || left < this.#counts.least) {
      if (features.workingSetControl) this.#reset(request, room);
      else room.begins = false;
      return false;
    }
    // Who was read twice is not to lose its memory again.
    const reserved = request.restarts > 0 ? maxTokens : Math.min(maxTokens, reservedAnswerTokens);
    const now = features.offload ? this.#counts.tokenBlocks(promptTokens) : 0;
    const all = features.offload ? this.#counts.tokenBlocks(promptTokens + reserved) : 0;
    if (!this.#blocks.begin(request, now, all - now)) {
      room.begins = false;
      return false;
    }
    this.#queues.begin(request);
    request.begin(this.settings.reuse(request));
    this.#hold(request);
    room.blocks -= held;
    return true;
  }

  #hold(request: Request): void {
    const { promptTokens, maxTokens, state } = request;
    this.#blocks.hold(request, this.#counts.held(promptTokens + maxTokens, promptTokens, state === 'reading'));
  }

  /** Line 14. */
  #reset(request: Request, room: Room): void {
    request.resets += 1;
    if (request.resets >= mostResets) this.#queues.promote(request);
    if (request.promoted) room.begins = false;
  }

  /**
   * Gives each answer the host memory of its next token. When there is none, those of which the least is computed go back to
   * the queue, until there is.
   */
  #growAnswers(): void {
    if (!this.settings.features.offload) return;
    for (const request of [...this.#queues.underWay]) {
      while (request.state === 'answering' && !this.#blocks.grow(request, this.#counts.tokenBlocks(request.length + 1))) {
        const least = this.#leastComputed();
        if (least === undefined) break;
        this.#restart(least);
      }
    }
  }

  /** Of those that may still lose their memory: who was read twice has all that it will need. */
  #leastComputed(): Request | undefined {
    const { layers } = this.settings.model;
    const victims = this.#queues.underWay.filter(({ state, restarts }) => state !== 'answered' && restarts === 0);
    return victims.reduce<Request | undefined>((least, one) => {
      return least === undefined || one.computed(layers) <= least.computed(layers) ? one : least;
    }, undefined);
  }

  #restart(request: Request): void {
    this.#blocks.release(request);
    request.restart();
    this.#queues.restart(request);
    this.#restarted.add(request);
  }

  #expectBudget(budgetTokens: number): void {
    const { features, budgetTokens: most } = this.settings;
    expectCount('budgetTokens', budgetTokens, 1);
    if (features.sparse) expectLeast('budgetTokens', budgetTokens, leastBudget(this.settings), 'sinks, window, the newest block and one to choose');
    expectThat('submit', 'budgetTokens', budgetTokens, budgetTokens <= most, `at most the scheduler's, ${most}`);
  }

  #expectOwn(given: ScheduledRequest): Request {
    if (given instanceof Request && this.#own.has(given)) return given;
    throw new InvalidValueError("The request is not this scheduler's; take one that its submit() gave.", { subject: 'request' });
  }
}

function tooSmall(name: string, given: number, least: number, what: string): OutOfMemoryError {
  return new OutOfMemoryError(`${name} is ${given}, in blocks of one layer, and ${what} takes ${least}, even alone. Give the cache more.`, {
    subject: name,
    given,
    wanted: least,
  });
}
