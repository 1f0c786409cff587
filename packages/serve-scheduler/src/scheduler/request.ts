import type { Reader } from './reader.js';

export interface RequestSize {
  readonly promptTokens: number;
  /** Tokens of its longest answer. */
  readonly maxTokens: number;
  /** Tokens that a kv head reads in a step of it, sinks and window included. Default, and at most: those of the scheduler. */
  readonly budgetTokens?: number | undefined;
}

/**
 * `waiting`: nothing of it is in memory; `reading`: some layers or tokens of its prompt are computed; `answering`: each step
 * gives it a token; `answered`: it has all its tokens, and its memory until `end`; `ended`.
 */
export type RequestState = 'waiting' | 'reading' | 'answering' | 'answered' | 'ended';

/** A size with its defaults. */
type WholeSize = { readonly [Name in keyof RequestSize]-?: number };

/** A request as the scheduler sees it. */
export interface ScheduledRequest extends WholeSize {
  /** Requests are served in this order. */
  readonly arrival: number;
  readonly state: RequestState;
  /** Tokens in its cache: those of the prompt once all layers have them, and those of the answer. */
  readonly length: number;
  /** Tokens of the answer that steps have been scheduled for. */
  readonly answered: number;
  /** First tokens of its prompt that were in memory when it began last, from another request. */
  readonly reusedTokens: number;
  /** How often it was left out of a step because device memory was short. */
  readonly resets: number;
  /** How often its host memory was taken. */
  readonly restarts: number;
}

/** The scheduler's own view of one. */
export class Request implements ScheduledRequest, Reader {
  readonly arrival: number;
  readonly promptTokens: number;
  readonly maxTokens: number;
  readonly budgetTokens: number;
  state: RequestState = 'waiting';
  /** Tokens of the prompt that passed `nextLayer` layers; those before `nextToken` passed one more. */
  nextLayer = 0;
  nextToken = 0;
  reusedTokens = 0;
  /** Tokens of the answer that are in the cache. */
  fed = 0;
  answered = 0;
  resets = 0;
  restarts = 0;
  /** Whether it goes first. */
  promoted = false;
  workingSet: number | undefined;

  constructor(arrival: number, { promptTokens, maxTokens, budgetTokens }: WholeSize) {
    this.arrival = arrival;
    this.promptTokens = promptTokens;
    this.maxTokens = maxTokens;
    this.budgetTokens = budgetTokens;
  }

  get isUnderWay(): boolean {
    return this.state !== 'waiting' && this.state !== 'ended';
  }

  get length(): number {
    return this.state === 'answering' || this.state === 'answered' ? this.promptTokens + this.fed : 0;
  }

  /** Tokens × layers that are computed, for requests of a model of so many layers. */
  computed(layers: number): number {
    return this.length > 0 ? this.length * layers : this.nextLayer * this.promptTokens + this.nextToken;
  }

  /** Its prompt is read from here on. */
  begin(reusedTokens: number): void {
    this.state = 'reading';
    this.reusedTokens = reusedTokens;
    this.nextToken = reusedTokens;
  }

  /** The step that gives it one token more. */
  answer(): void {
    this.fed += 1;
    this.answered = Math.max(this.answered, this.fed + 1);
    this.#settle();
  }

  /** The prompt's last part, which gives the first token. */
  finishPrompt(): void {
    this.fed = 0;
    this.answered = Math.max(this.answered, 1);
    this.#settle();
  }

  /** Back to the queue: the prompt is read again, and what is answered is fed again. */
  restart(): void {
    this.state = 'waiting';
    this.nextLayer = 0;
    this.nextToken = 0;
    this.reusedTokens = 0;
    this.fed = 0;
    this.workingSet = undefined;
    this.restarts += 1;
  }

  /** A replayed answer is never complete before its last token is given. */
  #settle(): void {
    this.state = this.fed + 1 >= this.maxTokens ? 'answered' : 'answering';
  }
}
