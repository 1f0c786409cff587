import type { Executor, Outcome, Step } from '../engine/executor.js';
import type { AnswerStep, Batch, PromptPart } from '../scheduler/batch.js';
import type { ScheduledRequest } from '../scheduler/request.js';
import type { Scheduler } from '../scheduler/scheduler.js';
import { pinnedBlocks } from '../scheduler/scheduler-options.js';
import { BlockCache } from './block-cache.js';
import { BlockReader } from './block-reader.js';
import type { Costs } from './costs.js';
import { Random } from './random.js';
import type { SimulatedModel, SystemFeatures } from './systems.js';

/** Heads of one layer that are simulated; they stand for all. */
const sampledHeads = 2;
const bytesPerNumber = 2;
/** Blocks of a request that are not those of another. */
const requestStride = 2 ** 20;

export interface SimulatedParts {
  readonly model: SimulatedModel;
  readonly features: SystemFeatures;
  readonly scheduler: Scheduler;
  readonly costs: Costs;
  readonly seed: number;
}

/** Computes nothing: says how long each step of a GPU would take, on a clock of its own. */
export class SimulatedExecutor implements Executor {
  readonly #parts: SimulatedParts;
  readonly #random: Random;
  readonly #pinned: number;
  /** Blocks of the sampled heads on the device. */
  readonly #cache: BlockCache;
  readonly #readers = new Map<ScheduledRequest, readonly BlockReader[]>();
  /** Milliseconds since the beginning. */
  now = 0;
  steps = 0;
  /** Blocks that were loaded, of all heads and layers. */
  loads = 0;

  constructor(parts: SimulatedParts) {
    this.#parts = parts;
    this.#random = new Random(parts.seed);
    this.#pinned = pinnedBlocks(parts.scheduler.settings);
    this.#cache = new BlockCache(this.#sampled(parts.scheduler.settings.deviceBlocks));
  }

  compute(batch: Batch): Promise<Step> {
    const missing = this.#parts.features.offload ? this.#read(batch) : 0;
    this.now += this.#milliseconds(batch, missing);
    this.steps += 1;
    this.loads += missing * this.#parts.model.layers;
    const outcomes: Outcome[] = [...batch.answers, ...batch.prompts.filter(({ isLast }) => isLast)]
      .filter(({ isReplay }) => !isReplay)
      .map(({ request }) => ({ request, id: 0 }));
    return Promise.resolve({ choose: () => Promise.resolve(outcomes), [Symbol.dispose]: () => undefined });
  }

  release(request: ScheduledRequest): void {
    this.#drop(request);
    this.#readers.delete(request);
  }

  #sampled(blocks: number): number {
    return Math.floor((blocks * sampledHeads) / this.#parts.model.kvHeads);
  }

  #drop({ arrival }: ScheduledRequest): void {
    this.#cache.forget(arrival * requestStride, (arrival + 1) * requestStride);
  }

  /** Blocks of one layer that the step has to load. */
  #read({ answers, restarted }: Batch): number {
    const { scheduler, model } = this.#parts;
    const { blockTokens, deviceBlocks } = scheduler.settings;
    for (const request of restarted) this.#drop(request);
    this.#cache.resize(this.#sampled(deviceBlocks - scheduler.heldDeviceBlocks));
    let missing = 0;
    for (const { request, budgetTokens } of answers) {
      const blocks = Math.max(0, Math.ceil(request.length / blockTokens) - this.#pinned);
      const budget = Math.floor(budgetTokens / blockTokens) - this.#pinned;
      const readers = this.#readersOf(request);
      readers.forEach((reader, head) => {
        const first = request.arrival * requestStride + head * (requestStride / sampledHeads);
        for (const block of reader.next(blocks, budget)) if (!this.#cache.read(first + block)) missing += 1;
      });
      const workingSet = readers.reduce((sum, reader) => sum + reader.workingSet, 0) / sampledHeads;
      if (request.state === 'answering') scheduler.observe(request, Math.ceil(workingSet * model.kvHeads));
    }
    return Math.round((missing * model.kvHeads) / sampledHeads);
  }

  #readersOf(request: ScheduledRequest): readonly BlockReader[] {
    const { blockTokens } = this.#parts.scheduler.settings;
    const most = Math.ceil((request.promptTokens + request.maxTokens) / blockTokens) + 1;
    const readers = this.#readers.get(request) ?? Array.from({ length: sampledHeads }, () => new BlockReader(this.#random, most));
    this.#readers.set(request, readers);
    return readers;
  }

  #milliseconds({ answers, prompts }: Batch, missing: number): number {
    const answering = answers.length === 0 ? 0 : this.#answering(answers) + this.#loading(missing);
    return prompts.reduce((sum, part) => sum + this.#reading(part), answering);
  }

  /** A step of answers, all of whose blocks are there. */
  #answering(answers: readonly AnswerStep[]): number {
    const { costs, model, features } = this.#parts;
    const { layers, kvHeads } = model;
    const { blockTokens } = this.#parts.scheduler.settings;
    const read = answers.reduce((sum, { request: { length }, budgetTokens }) => {
      return sum + (features.sparse ? Math.min(length, budgetTokens) : length);
    }, 0);
    const scored = answers.reduce((sum, { request: { length } }) => sum + Math.ceil(length / blockTokens), 0);
    const selection = features.sparse ? costs.milliseconds('selection', scored * kvHeads) : 0;
    return this.#rows(answers.length) + layers * (costs.milliseconds('decodeAttention', read * kvHeads) + selection);
  }

  #loading(missing: number): number {
    const { costs, model, features } = this.#parts;
    return costs.transfer(features.fastTransfer ? 'gather' : 'copies', missing * model.layers * this.#blockBytes);
  }

  /** A part of a prompt, whose blocks go to host memory beside it. */
  #reading({ firstToken, endToken, firstLayer, endLayer }: PromptPart): number {
    const { costs, model, features } = this.#parts;
    const tokens = endToken - firstToken;
    const layers = endLayer - firstLayer;
    const pairs = (tokens * (firstToken + endToken)) / 2;
    const attention = costs.milliseconds('prefillAttention', (model.queryHeads * pairs) / 2 ** 20);
    const computing = layers * (this.#rows(tokens) / model.layers + attention);
    if (!features.offload) return computing;
    const blocks = (tokens / this.#parts.scheduler.settings.blockTokens) * model.kvHeads * layers;
    return Math.max(computing, costs.transfer(features.fastTransfer ? 'save' : 'saveCopies', blocks * this.#blockBytes));
  }

  /** All layers without attention. What was measured of one model holds for another by the bytes of its weights. */
  #rows(rows: number): number {
    const { costs, model } = this.#parts;
    return (costs.milliseconds('rows', rows) * model.parameters) / costs.measured.parameters;
  }

  get #blockBytes(): number {
    const { blockTokens } = this.#parts.scheduler.settings;
    return 2 * blockTokens * this.#parts.model.headDim * bytesPerNumber;
  }
}
