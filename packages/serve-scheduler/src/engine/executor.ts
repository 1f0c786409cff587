import type { Batch } from '../scheduler/batch.js';
import type { ScheduledRequest } from '../scheduler/request.js';

/** Working sets are asked for every so many steps: they change slowly, and asking for them costs as much as a step. */
export const stepsObserved = 8;

/** The next token of a request, or why it has none. */
export type Outcome =
  | { readonly request: ScheduledRequest; readonly id: number; readonly failure?: undefined }
  | { readonly request: ScheduledRequest; readonly failure: Error };

/** A step whose work is on its way. Disposed, it gives back what it would have chosen from. */
export interface Step extends Disposable {
  /** Chooses its tokens, once those of the step before are known. Called once. Rejects when the work failed as a whole. */
  choose(): Promise<readonly Outcome[]>;
}

/** Computes the batches of a scheduler in their order. */
export interface Executor {
  /** Starts a step, while the tokens of the one before may not be known yet. Rejects when it fails as a whole. */
  compute(batch: Batch): Promise<Step>;
  /** Gives back what a request has taken. */
  release(request: ScheduledRequest): void;
}
