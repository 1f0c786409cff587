import { stepsObserved } from '../engine/executor.js';
import type { Executor, Outcome, Step } from '../engine/executor.js';
import type { Batch, PromptPart } from '../scheduler/batch.js';
import type { ScheduledRequest } from '../scheduler/request.js';
import type { Scheduler } from '../scheduler/scheduler.js';
import { pinnedBlocks } from '../scheduler/scheduler-options.js';
import { BlockCache } from './block-cache.js';
import { BlockReader } from './block-reader.js';
import type { Locality } from './block-reader.js';
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
  readonly locality?: Locality | undefined;
}

/** The number of a request's first block of a head. */
const firstBlock = ({ arrival }: ScheduledRequest, head: number): number => arrival * requestStride + head * (requestStride / sampledHeads);

/** Milliseconds of all steps, by what they went to. */
export interface SpentTime {
  /** Answers: what all rows pass but attention. */
  weights: number;
  attention: number;
  /** Scores, the choice of blocks, their plan, and what else two memories take where nothing is missing. */
  choice: number;
  loading: number;
  prompts: number;
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
  /** Steps that answer. */
  answering = 0;
  answers = 0;
  /** Blocks that were loaded, of all heads and layers. */
  loads = 0;
  readonly spent: SpentTime = { weights: 0, attention: 0, choice: 0, loading: 0, prompts: 0 };

  constructor(parts: SimulatedParts) {
    this.#parts = parts;
    this.#random = new Random(parts.seed);
    this.#pinned = pinnedBlocks(parts.scheduler.settings);
    this.#cache = new BlockCache(this.#sampled(parts.scheduler.settings.deviceBlocks));
  }

  compute(batch: Batch): Promise<Step> {
    const missing = this.#parts.features.offload ? this.#read(batch) : 0;
    if (this.#parts.features.offload) for (const part of batch.prompts) this.#bring(part);
    const spent = this.#milliseconds(batch, missing);
    for (const [part, milliseconds] of Object.entries(spent) as [keyof SpentTime, number][]) {
      this.now += milliseconds;
      this.spent[part] += milliseconds;
    }
    this.steps += 1;
    this.answers += batch.answers.length;
    if (batch.answers.length > 0) this.answering += 1;
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
        const first = firstBlock(request, head);
        for (const block of reader.next(blocks, budget)) if (!this.#cache.read(first + block)) missing += 1;
      });
      if (request.state !== 'answering' || (this.steps + 1) % stepsObserved > 0) continue;
      const workingSet = readers.reduce((sum, reader) => sum + reader.workingSet, 0) / sampledHeads;
      scheduler.observe(request, Math.ceil(workingSet * model.kvHeads));
    }
    return Math.round((missing * model.kvHeads) / sampledHeads);
  }

  /** Blocks of a prompt go to the device's cache as long as it has room. Those of all layers are taken to come with the last one. */
  #bring({ request, firstToken, endToken, endLayer }: PromptPart): void {
    const { scheduler, model } = this.#parts;
    const { blockTokens, sinkTokens } = scheduler.settings;
    if (endLayer < model.layers) return;
    const sinks = Math.ceil(sinkTokens / blockTokens);
    const [first, end] = [firstToken, endToken].map((tokens) => Math.floor(tokens / blockTokens) - sinks) as [number, number];
    for (let block = Math.max(0, first); block < end; block++) {
      for (let head = 0; head < sampledHeads; head++) this.#cache.offer(firstBlock(request, head) + block);
    }
  }

  #readersOf(request: ScheduledRequest): readonly BlockReader[] {
    const { blockTokens } = this.#parts.scheduler.settings;
    const most = Math.ceil((request.promptTokens + request.maxTokens) / blockTokens) + 1;
    const readers = this.#readers.get(request) ?? Array.from({ length: sampledHeads }, () => new BlockReader(this.#random, most, this.#parts.locality));
    this.#readers.set(request, readers);
    return readers;
  }

  #milliseconds({ answers, prompts }: Batch, missing: number): SpentTime {
    const reading = prompts.reduce((sum, part) => sum + this.#reading(part), 0);
    if (answers.length === 0) return { weights: 0, attention: 0, choice: 0, loading: 0, prompts: reading };
    const { costs, model, features } = this.#parts;
    const { layers, kvHeads } = model;
    const { blockTokens } = this.#parts.scheduler.settings;
    const read = answers.reduce((sum, { request: { length }, budgetTokens }) => {
      return sum + (features.sparse ? Math.min(length, budgetTokens) : length);
    }, 0);
    const scored = answers.reduce((sum, { request: { length } }) => sum + Math.ceil(length / blockTokens), 0);
    const selection = features.sparse ? costs.milliseconds('selection', scored * kvHeads) : 0;
    const keeping = features.offload ? costs.milliseconds('keeping', answers.length) : 0;
    return {
      weights: this.#rows(answers.length),
      attention: layers * costs.milliseconds('decodeAttention', read * kvHeads),
      choice: layers * (selection + keeping),
      loading: this.#loading(missing),
      prompts: reading,
    };
  }

  /** Finding places for what is missing, and bringing it there. */
  #loading(missing: number): number {
    if (missing === 0) return 0;
    const { costs, model, features, scheduler } = this.#parts;
    const placing = model.layers * costs.milliseconds('placing', scheduler.settings.deviceBlocks);
    return placing + costs.transfer(features.fastTransfer ? 'gather' : 'copies', missing * model.layers * this.#blockBytes);
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
    const bytes = blocks * this.#blockBytes;
    const besides = costs.besideSaves * costs.transfer('save', bytes);
    return Math.max(computing + besides, costs.transfer(features.fastTransfer ? 'save' : 'saveCopies', bytes));
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
