import { InvalidValueError } from '@kv/sparse-core';

import { Costs } from './costs.js';
import { goodput } from './goodput.js';
import { simulate } from './simulate.js';
import type { SimulationResult } from './simulate.js';
import { simulatedModels, systems } from './systems.js';
import type { SimulatedModelName, SystemName } from './systems.js';
import { poissonTrace } from './trace.js';

/** The paper's figures that a scheduler alone decides, as it numbers them. */
export const figureNames = ['10', '11', '12', '13', '15', '16a'] as const;
export type FigureName = (typeof figureNames)[number];

export interface FigureOptions {
  readonly model: SimulatedModelName;
  /** Of each trace. Default 60. */
  readonly requests?: number | undefined;
  readonly seed?: number | undefined;
  /** Requests a second. Default: some below and above what `base` serves. */
  readonly rates?: readonly number[] | undefined;
  /** Default: those of one H200. */
  readonly costs?: Costs | undefined;
  readonly signal?: AbortSignal | undefined;
}

/** A figure as a table. None of its numbers was measured. */
export interface FigureTable {
  readonly figure: FigureName;
  readonly title: string;
  readonly kind: 'simulated';
  readonly gpu: string;
  /** The first is what the rows differ by. */
  readonly columns: readonly string[];
  readonly rows: readonly (readonly (string | number)[])[];
}

const rates = { 'lwm-7b': [0.5, 1, 1.5, 2, 2.5], 'llama3-8b': [1, 2, 3, 4, 5] };
const queueing = 2000;
/** The P99 between tokens is so many decoding iterations: of 8 answers over 10,000 tokens each, without any feature. */
const iterations = 25;
const iteration = { answers: 8, tokens: 10_000 };

type Runs = (rate: number, system: SystemName) => Promise<SimulationResult>;
type Value = (result: SimulationResult) => number;

/**
 * Figures 10 to 13, 15 and 16a of the paper, simulated. Runs that figures share are made once.
 * @throws InvalidValueError for a figure or a model that there is not
 */
export async function simulateFigures(names: readonly FigureName[], options: FigureOptions): Promise<FigureTable[]> {
  const { model: modelName, requests = 60, seed = 1, costs = new Costs(), signal } = options;
  expectOneOf('model', modelName, Object.keys(simulatedModels));
  for (const name of names) expectOneOf('figure', name, figureNames);
  const model = simulatedModels[modelName];
  const given = options.rates ?? rates[modelName];
  const done = new Map<string, Promise<SimulationResult>>();
  const run: Runs = (rate, system) => {
    const key = `${rate} ${system}`;
    const trace = (): ReturnType<typeof poissonTrace> => poissonTrace(requests, rate, model.contextTokens, seed);
    const result = done.get(key) ?? simulate({ model, features: systems[system], trace: trace(), costs, seed, signal });
    done.set(key, result);
    return result;
  };
  const table = async (name: FigureName): Promise<Omit<FigureTable, 'figure' | 'kind' | 'gpu'>> => {
    if (name !== '13') return await byRate(name, given, run);
    const { layers, kvHeads, parameters } = model;
    const rows = (costs.milliseconds('rows', iteration.answers) * parameters) / costs.measured.parameters;
    const attention = costs.milliseconds('decodeAttention', iteration.answers * iteration.tokens * kvHeads);
    const level = { betweenTokens99: iterations * (rows + layers * attention), queueing };
    const found: (readonly (string | number)[])[] = [];
    let before = NaN;
    for (const [system, features] of Object.entries(systems)) {
      const rate = await goodput({ model, features, costs, seed, requests, level, signal });
      found.push([system, rate, rate / before]);
      before = rate;
    }
    return { title: 'requests/s within the service level', columns: ['system', 'requests/s', 'times the one before'], rows: found };
  };
  const tables: FigureTable[] = [];
  for (const figure of names) tables.push({ figure, kind: 'simulated', gpu: costs.gpu, ...(await table(figure)) });
  return tables;
}

async function byRate(
  name: Exclude<FigureName, '13'>,
  given: readonly number[],
  run: Runs,
): Promise<Omit<FigureTable, 'figure' | 'kind' | 'gpu'>> {
  const [title, columns] = plans[name];
  const rows: number[][] = [];
  for (const rate of given) {
    const row = [rate];
    for (const { system, value } of columns) row.push(value(await run(rate, system)));
    rows.push(row);
  }
  return { title, columns: ['requests/s', ...columns.map(({ header }) => header)], rows };
}

interface Column {
  readonly header: string;
  readonly system: SystemName;
  readonly value: Value;
}

const compared: readonly SystemName[] = ['base', '+SA', '+Offload', '+LP'];
const each = (value: Value): Column[] => compared.map((system) => ({ header: system, system, value }));
const firstToken: Value = (result) => result.firstToken;
const perSecond: Value = (result) => result.tokensPerSecond;
const loads: Value = (result) => result.loadsPerStep;

const plans: Record<Exclude<FigureName, '13'>, readonly [title: string, columns: readonly Column[]]> = {
  10: ['mean time to the first token, ms', each(firstToken)],
  11: ['tokens/s', each(perSecond)],
  12: ['mean time between tokens, ms', each((result) => result.betweenTokens)],
  15: [
    'working-set control: tokens/s, and blocks loaded in a step',
    [
      { header: 'tokens/s without', system: '+FT', value: perSecond },
      { header: 'with', system: '+WC', value: perSecond },
      { header: 'loads without', system: '+FT', value: loads },
      { header: 'with ', system: '+WC', value: loads },
    ],
  ],
  '16a': [
    'prompts in chunks and in layer segments: mean time to the first token, ms',
    [
      { header: 'chunks', system: '+WC', value: firstToken },
      { header: 'layer segments', system: '+LP', value: firstToken },
    ],
  ],
};

function expectOneOf(subject: string, given: string, wanted: readonly string[]): void {
  if (wanted.includes(given)) return;
  throw new InvalidValueError(`simulateFigures: ${subject} is '${given}'; it must be one of ${wanted.join(', ')}.`, {
    subject,
    given,
    wanted,
  });
}
