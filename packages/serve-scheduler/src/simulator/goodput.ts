import type { Costs } from './costs.js';
import { paperCosts } from './paper-costs.js';
import type { SimulationResult } from './simulate.js';
import type { SimulatedModel } from './systems.js';

/** What must hold of a load that is served well (section 4.2 of the paper). */
export interface ServiceLevel {
  /** Milliseconds that 99 of 100 tokens follow the one before within. */
  readonly betweenTokens99: number;
  /** Milliseconds that a request waits for its first part, on average. */
  readonly queueing: number;
}

/** The P99 between tokens is so many decoding iterations: of 8 answers over 10,000 tokens each, without any feature. */
const iterations = 25;
const iteration = { answers: 8, tokens: 10_000 };
/** The mean wait, as the paper has it for its own machine. */
const queueing = 2000;

/** The search ends when what is known to be too much is so much more than what is known to be served. */
const precision = 1.025;
const firstRate = 1 / 16;
const mostRate = 1024;

/** Requests a second, the largest rate at which the level holds. `run` serves the same requests at other times. */
export async function goodput(run: (rate: number) => Promise<SimulationResult>, level: ServiceLevel): Promise<number> {
  const isServed = async (rate: number): Promise<boolean> => holds(await run(rate), level);
  let most = firstRate;
  while (most < mostRate && (await isServed(most))) most *= 2;
  let least = most === firstRate ? 0 : most / 2;
  while (most - least > least * (precision - 1) && most > firstRate / 64) {
    const middle = (least + most) / 2;
    if (await isServed(middle)) least = middle;
    else most = middle;
  }
  return least;
}

function holds({ betweenTokens99, queueing }: SimulationResult, level: ServiceLevel): boolean {
  return betweenTokens99 <= level.betweenTokens99 && queueing <= level.queueing;
}

/** The paper's level, and the one where requests may wait as many iterations as they may on the paper's machine. */
export function serviceLevels(model: SimulatedModel, costs: Costs): readonly [ServiceLevel, ServiceLevel] {
  const milliseconds = iterationOf(model, costs);
  const betweenTokens99 = iterations * milliseconds;
  return [{ betweenTokens99, queueing }, { betweenTokens99, queueing: queueing * (milliseconds / iterationOf(model, paperCosts())) }];
}

function iterationOf({ layers, kvHeads, parameters }: SimulatedModel, costs: Costs): number {
  const rows = (costs.milliseconds('rows', iteration.answers) * parameters) / costs.measured.parameters;
  return rows + layers * costs.milliseconds('decodeAttention', iteration.answers * iteration.tokens * kvHeads);
}
