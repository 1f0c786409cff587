import type { Costs } from './costs.js';
import { simulate } from './simulate.js';
import type { SimulatedModel, SystemFeatures } from './systems.js';

export interface ClosedLoopOptions {
  readonly model: SimulatedModel;
  readonly features: SystemFeatures;
  readonly costs: Costs;
  /** Answers under way from the first step to the last. */
  readonly answers: number;
  readonly seed: number;
  readonly signal?: AbortSignal | undefined;
}

export interface ClosedLoopResult {
  /** Of a step of all answers, the median. */
  readonly milliseconds: number;
  /** Of them, loading blocks. */
  readonly loading: number;
  readonly tokensPerSecond: number;
  readonly loadsPerStep: number;
}

/** Prompts are half as long as the longest request, and answers are long enough that reading the prompts does not count. */
const share = 1 / 2;
const answerTokens = 512;

/** A batch of one size, again and again: Fig. 1 and 14a of the paper. */
export async function closedLoop({ model, features, costs, answers, seed, signal }: ClosedLoopOptions): Promise<ClosedLoopResult> {
  const promptTokens = Math.floor(Math.min(model.contextTokens, 32_768) * share);
  const trace = Array.from({ length: answers }, () => ({ milliseconds: 0, promptTokens, maxTokens: answerTokens }));
  const result = await simulate({ model, features, trace, costs, seed, maxRequests: answers, promptTokens, signal });
  const { betweenTokens50: milliseconds, loadsPerStep } = result;
  const blockBytes = 4 * 32 * model.headDim;
  const loading = features.offload ? costs.transfer(features.fastTransfer ? 'gather' : 'copies', loadsPerStep * blockBytes) : 0;
  return { milliseconds, loading, tokensPerSecond: (1000 * answers) / milliseconds, loadsPerStep };
}
