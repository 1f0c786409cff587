import type { BatchEntry, Logits, ModelBatch, Runner, Sequence } from '@kv/model';
import { OutOfMemoryError } from '@kv/sparse-core';
import type { KvDemand, KvSelector, SampleSettings } from '@kv/sparse-core';

import type { AnswerStep, Batch, PromptPart } from '../scheduler/batch.js';
import { tokenLayers } from '../scheduler/next-part.js';
import type { ScheduledRequest } from '../scheduler/request.js';
import { originOf } from './as-error.js';
import type { Executor, Outcome, Step } from './executor.js';
import { KeptPrompts } from './kept-prompts.js';
import type { KeptPrefix } from './kept-prompts.js';
import { TokenChoice } from './token-choice.js';

/** What a request is computed from. */
export interface RequestWork {
  readonly prompt: Int32Array;
  readonly sampling: SampleSettings;
  /** Default: that of the runner's policy. */
  readonly select?: KvSelector | undefined;
}

export interface ExecutorOptions {
  readonly sequences: number;
  /** Whether a prompt passes layer by layer, not some of its tokens all layers. */
  readonly layerSegments: boolean;
  /** Prompts that stay in memory, and the tokens of all of them. */
  readonly keptPrompts: number;
  readonly keptTokens: number;
  /** A prompt begins behind a kept one at a multiple of so many tokens. */
  readonly grid: number;
}

interface Running extends RequestWork {
  /** The prompt, and the tokens of the answer that are known. */
  readonly tokens: number[];
  sequence?: Sequence | undefined;
  /** What it begins with. */
  prefix?: KeptPrefix | undefined;
  /** A prompt between its layers. */
  segment?: ModelBatch | undefined;
  /** The row of the newest choice that holds a token nobody knows yet. */
  row: number;
  /** What was told of its sequence last. */
  demand?: KvDemand | undefined;
  /** It could not be computed: steps that were planned before that was known leave it out. */
  failed: boolean;
}

/** Rows that were computed, whose tokens are to be chosen. */
interface ScoredRows {
  readonly logits: Logits;
  readonly rows: readonly { readonly request: ScheduledRequest; readonly running: Running; readonly isReplay: boolean }[];
}

/** Computes batches on a runner: the answers in a recorded step, then parts of prompts. */
export class RunnerExecutor implements Executor, Disposable {
  readonly #runner: Runner;
  readonly #running = new Map<ScheduledRequest, Running>();
  readonly #layerSegments: boolean;
  readonly #kept: KeptPrompts;
  readonly #keepsAny: boolean;
  /** How often the answers of a step were computed in several. */
  split = 0;
  /** Blocks that answers read, of all layers: those that were on the device, and those that were loaded. */
  readonly blocks = { found: 0, loaded: 0 };
  /** What the newest step chose; the next one is computed from it before it is read. */
  #newest: TokenChoice;
  #other: TokenChoice;

  constructor(runner: Runner, { sequences, layerSegments, keptPrompts, keptTokens, grid }: ExecutorOptions) {
    this.#runner = runner;
    this.#layerSegments = layerSegments;
    this.#newest = new TokenChoice(runner.stream, sequences);
    this.#other = new TokenChoice(runner.stream, sequences);
    this.#kept = new KeptPrompts(keptPrompts, keptTokens, grid);
    this.#keepsAny = keptPrompts > 0;
  }

  /** Says what a request is computed from, before a batch names it. */
  add(request: ScheduledRequest, work: RequestWork): void {
    this.#running.set(request, { ...work, tokens: Array.from(work.prompt), row: 0, failed: false });
  }

  /** How many first tokens of a prompt that begins in the next batch a kept one holds. */
  findPrefix(request: ScheduledRequest): number {
    const running = this.#of(request);
    running.prefix = this.#keeps(running) ? this.#kept.find(running.prompt) : undefined;
    return running.prefix?.tokens ?? 0;
  }

  /** What the newest steps of a request read of a layer's cache, as far as that is known. */
  workingSet(request: ScheduledRequest): number | undefined {
    const running = this.#of(request);
    const { sequence, demand: before } = running;
    const told = sequence && !sequence.disposed ? this.#runner.demand(sequence) : undefined;
    if (told === undefined) return undefined;
    this.blocks.found += told.hits - (before?.hits ?? 0);
    this.blocks.loaded += told.misses - (before?.misses ?? 0);
    running.demand = told;
    return told.workingSet;
  }

  /** Drops what the device holds of a request beside host memory. @throws CapabilityError where that is nothing */
  evict(request: ScheduledRequest): void {
    const { sequence } = this.#of(request);
    if (sequence && !sequence.disposed) this.#runner.evict(sequence);
  }

  async compute({ answers, prompts, restarted }: Batch): Promise<Step> {
    for (const request of restarted) this.#drop(this.#of(request));
    const scored: ScoredRows[] = [];
    const failed: Outcome[] = [];
    const dispose = (): void => {
      for (const { logits } of scored) logits.dispose();
    };
    try {
      const whole = answers.filter(({ request }) => !this.#of(request).failed);
      if (whole.length > 0) await this.#answer(whole, scored, failed);
      for (const part of prompts) {
        if (this.#of(part.request).failed) continue;
        try {
          const rows = await this.#read(part);
          if (rows !== undefined) scored.push(rows);
        } catch (error) {
          // What fails while one prompt is read, such as its selection, is no matter of the others.
          this.#of(part.request).failed = true;
          failed.push({ request: part.request, failure: originOf(error) });
        }
      }
    } catch (error) {
      dispose();
      throw error;
    }
    return { choose: async () => [...failed, ...(await this.#choose(scored))], [Symbol.dispose]: dispose };
  }

  /** A prompt of which a token is known stays, if there is room for it. */
  release(request: ScheduledRequest): void {
    const running = this.#running.get(request);
    if (running === undefined) return;
    this.#running.delete(request);
    const { sequence, prompt, tokens, segment } = running;
    const isWhole = segment === undefined && tokens.length > prompt.length && (sequence?.length ?? 0) >= prompt.length;
    if (sequence === undefined || sequence.disposed || !isWhole || !this.#keeps(running)) {
      this.#drop(running);
      return;
    }
    this.#runner.truncate(sequence, prompt.length);
    this.#kept.keep(prompt, sequence);
  }

  [Symbol.dispose](): void {
    this.#kept[Symbol.dispose]();
    for (const running of this.#running.values()) this.#drop(running);
    this.#running.clear();
    this.#newest[Symbol.dispose]();
    this.#other[Symbol.dispose]();
  }

  /** One step of all, or several where the cache has no room for what all of them read at once. */
  async #answer(answers: readonly AnswerStep[], scored: ScoredRows[], failed: Outcome[]): Promise<void> {
    const rows = answers.map(({ request, isReplay }) => ({ request, running: this.#of(request), isReplay }));
    const entries = rows.map(({ running }, index): BatchEntry => {
      const known = running.tokens[running.prompt.length + (answers[index]?.fed ?? 0)];
      const ids = known === undefined ? this.#newest.idsOf(running.row) : [known];
      const sequence = sequenceOf(running);
      if (this.#runner.residency) this.#runner.setBudget(sequence, answers[index]?.budgetTokens);
      return { sequence, ids, phase: 'decode' };
    });
    try {
      scored.push({ logits: await this.#runner.step(entries), rows });
    } catch (error) {
      // Nothing was enqueued.
      if (!(error instanceof OutOfMemoryError)) throw error;
      const [only] = rows;
      if (only && rows.length === 1) {
        only.running.failed = true;
        failed.push({ request: only.request, failure: error });
        return;
      }
      this.split += 1;
      const middle = answers.length >> 1;
      await this.#answer(answers.slice(0, middle), scored, failed);
      await this.#answer(answers.slice(middle), scored, failed);
    }
  }

  /** The logits of its last token, where the part is the prompt's last. */
  async #read(part: PromptPart): Promise<ScoredRows | undefined> {
    const { request, firstToken, endToken, isLast, isReplay } = part;
    const running = this.#of(request);
    running.sequence ??= this.#open(running);
    const batch = await this.#withRoom(running, () => {
      return (running.segment ??= this.#begin(running, firstToken, this.#layerSegments ? running.prompt.length : endToken));
    });
    const end = tokenLayersOf(batch) + tokenLayers(part);
    await this.#withRoom(running, () => this.#runner.runSegment(batch, end - tokenLayersOf(batch)));
    if (batch.nextLayer < this.#runner.model.config.layers) return undefined;
    running.segment = undefined;
    try {
      return isLast ? { logits: this.#runner.head(batch), rows: [{ request, running, isReplay }] } : undefined;
    } finally {
      batch.dispose();
    }
  }

  /** Tries once more where the device lacked room, with the rows of other prompts that wait between their layers in host memory. */
  async #withRoom<Result>(running: Running, work: () => Result | Promise<Result>): Promise<Result> {
    try {
      return await work();
    } catch (error) {
      const others = [...this.#running.values()].flatMap(({ segment }) => (segment === undefined || segment === running.segment ? [] : [segment]));
      const onDevice = others.filter(({ bytes }) => bytes.host === 0);
      if (!(error instanceof OutOfMemoryError) || onDevice.length === 0) throw error;
      for (const segment of onDevice) await this.#runner.moveToHost(segment);
      return await work();
    }
  }

  #begin(running: Running, firstToken: number, endToken: number): ModelBatch {
    const phase = endToken === running.prompt.length ? 'prefill-end' : 'prefill';
    const ids = running.prompt.subarray(firstToken, endToken);
    const batch = this.#runner.createBatch([{ sequence: sequenceOf(running), ids, phase }]);
    this.#runner.embed(batch);
    return batch;
  }

  async #choose(scored: readonly ScoredRows[]): Promise<Outcome[]> {
    [this.#newest, this.#other] = [this.#other, this.#newest];
    let first = 0;
    for (const { logits, rows } of scored) {
      this.#newest.choose(this.#runner.stream, first, logits, rows.map(({ running }) => running));
      for (const { running } of rows) running.row = first++;
    }
    const ids = await this.#newest.read(first);
    const outcomes: Outcome[] = [];
    scored.flatMap(({ rows }) => rows).forEach(({ request, running, isReplay }, row) => {
      const id = ids[row];
      const failure = running.sequence?.failure ?? (id instanceof Error ? id : undefined);
      if (failure) outcomes.push({ request, failure });
      else if (!isReplay && typeof id === 'number') {
        running.tokens.push(id);
        outcomes.push({ request, id });
      }
    });
    return outcomes;
  }

  /** One that holds all of its prompt and no selection of it. */
  #keeps({ select }: RequestWork): boolean {
    return this.#keepsAny && select === undefined;
  }

  #drop(running: Running): void {
    running.segment?.dispose();
    running.sequence?.dispose();
    running.segment = undefined;
    running.sequence = undefined;
    running.demand = undefined;
  }

  #open({ prefix, select }: Running): Sequence {
    if (prefix === undefined) return this.#runner.openSequence({ select });
    return this.#runner.fork(prefix.sequence, { tokens: prefix.tokens });
  }

  #of(request: ScheduledRequest): Running {
    const running = this.#running.get(request);
    if (running === undefined) throw new Error(`request ${request.arrival} was not added`);
    return running;
  }
}

/** Rows × layers of a batch that are enqueued. */
function tokenLayersOf({ nextLayer, nextRow, rows }: ModelBatch): number {
  return nextLayer * rows + nextRow;
}

function sequenceOf({ sequence }: Running): Sequence {
  if (sequence === undefined) throw new Error('a prompt comes before its answer');
  return sequence;
}
