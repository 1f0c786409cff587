import type { ScheduledRequest } from './request.js';

/** One token more of an answer. */
export interface AnswerStep {
  readonly request: ScheduledRequest;
  /** Tokens that a kv head reads: fewer than usual when the request alone is too large for device memory. */
  readonly budgetTokens: number;
  /** Which token of the answer is fed, counted from 0. */
  readonly fed: number;
  /** The token that comes of it is known: memory was taken from the request after it was given. */
  readonly isReplay: boolean;
}

/** Tokens of a prompt on their way through some layers. */
export interface PromptPart {
  readonly request: ScheduledRequest;
  /** Which tokens of the prompt: from `firstToken` to before `endToken`. */
  readonly firstToken: number;
  readonly endToken: number;
  /** Through which layers: from `firstLayer` to before `endLayer`. */
  readonly firstLayer: number;
  readonly endLayer: number;
  /** Whether the prompt is complete with it, which gives the first token of the answer. */
  readonly isLast: boolean;
  /** As in `AnswerStep`. */
  readonly isReplay: boolean;
}

/** What one step computes. */
export interface Batch {
  readonly answers: readonly AnswerStep[];
  readonly prompts: readonly PromptPart[];
  /** Requests whose memory is to be given back first, on both sides: they will be read again. */
  readonly restarted: readonly ScheduledRequest[];
  /** M_used: blocks of one layer that are counted for the step; those of answers with working-set control alone. */
  readonly deviceBlocks: number;
}
