import type { BatchEntry, Logits, ModelBatch, Runner, Sequence } from '@kv/model';
import { OutOfMemoryError } from '@kv/sparse-core';
import type { KvSelector, SampleSettings } from '@kv/sparse-core';

import type { AnswerStep, Batch, PromptPart } from '../scheduler/batch.js';
import type { ScheduledRequest } from '../scheduler/request.js';
import { asError } from './as-error.js';
import type { Executor, Outcome, Step } from './executor.js';
import { TokenChoice } from './token-choice.js';

/** What a request is computed from. */
export interface RequestWork {
  readonly prompt: Int32Array;
  readonly sampling: SampleSettings;
  /** Default: that of the runner's policy. */
  readonly select?: KvSelector | undefined;
}

interface Running extends RequestWork {
  /** The prompt, and the tokens of the answer that are known. */
  readonly tokens: number[];
  sequence?: Sequence | undefined;
  /** A prompt between its layers. */
  segment?: ModelBatch | undefined;
  /** The row of the newest choice that holds a token nobody knows yet. */
  row: number;
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
  /** What the newest step chose; the next one is computed from it before it is read. */
  #newest: TokenChoice;
  #other: TokenChoice;

  constructor(runner: Runner, mostRequests: number) {
    this.#runner = runner;
    this.#newest = new TokenChoice(runner.stream, mostRequests);
    this.#other = new TokenChoice(runner.stream, mostRequests);
  }

  /** Says what a request is computed from, before a batch names it. */
  add(request: ScheduledRequest, work: RequestWork): void {
    this.#running.set(request, { ...work, tokens: Array.from(work.prompt), row: 0, failed: false });
  }

  async compute({ answers, prompts }: Batch): Promise<Step> {
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
          failed.push({ request: part.request, failure: asError(error) });
        }
      }
    } catch (error) {
      dispose();
      throw error;
    }
    return { choose: async () => [...failed, ...(await this.#choose(scored))], [Symbol.dispose]: dispose };
  }

  release(request: ScheduledRequest): void {
    const running = this.#running.get(request);
    this.#running.delete(request);
    running?.segment?.dispose();
    running?.sequence?.dispose();
  }

  [Symbol.dispose](): void {
    for (const request of this.#running.keys()) this.release(request);
    this.#newest[Symbol.dispose]();
    this.#other[Symbol.dispose]();
  }

  /** One step of all, or several where the cache has no room for what all of them read at once. */
  async #answer(answers: readonly AnswerStep[], scored: ScoredRows[], failed: Outcome[]): Promise<void> {
    const rows = answers.map(({ request, isReplay }) => ({ request, running: this.#of(request), isReplay }));
    const entries = rows.map(({ running }, index): BatchEntry => {
      const known = running.tokens[running.prompt.length + (answers[index]?.fed ?? 0)];
      const ids = known === undefined ? this.#newest.idsOf(running.row) : [known];
      return { sequence: this.#sequence(running), ids, phase: 'decode' };
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
      const middle = answers.length >> 1;
      await this.#answer(answers.slice(0, middle), scored, failed);
      await this.#answer(answers.slice(middle), scored, failed);
    }
  }

  /** The logits of its last token, where the part is the prompt's last. */
  async #read({ request, firstToken, endToken, firstLayer, endLayer, isLast, isReplay }: PromptPart): Promise<ScoredRows | undefined> {
    const running = this.#of(request);
    const batch = (running.segment ??= this.#begin(running, firstToken, endToken));
    await this.#runner.runLayers(batch, firstLayer, endLayer);
    if (endLayer < this.#runner.model.config.layers) return undefined;
    running.segment = undefined;
    try {
      return isLast ? { logits: this.#runner.head(batch), rows: [{ request, running, isReplay }] } : undefined;
    } finally {
      batch.dispose();
    }
  }

  #begin(running: Running, firstToken: number, endToken: number): ModelBatch {
    const phase = endToken === running.prompt.length ? 'prefill-end' : 'prefill';
    const ids = running.prompt.subarray(firstToken, endToken);
    const batch = this.#runner.createBatch([{ sequence: this.#sequence(running), ids, phase }]);
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

  #sequence(running: Running): Sequence {
    running.sequence ??= this.#runner.openSequence({ select: running.select ?? this.#runner.policy.select });
    return running.sequence;
  }

  #of(request: ScheduledRequest): Running {
    const running = this.#running.get(request);
    if (running === undefined) throw new Error(`request ${request.arrival} was not added`);
    return running;
  }
}
