import { InvalidValueError } from '@kv/sparse-core';
import { expectCallback, expectOptions, expectSignal, expectThat, listOf, show } from '@kv/sparse-core/native';

import { overlapByWindow } from './block-reader.js';
import { attentionByChunk, loadingByBatch, savingByPrompt, throughputByBatch } from './batch-figures.js';
import type { BatchOptions } from './batch-figures.js';
import { Costs } from './costs.js';
import { goodput, serviceLevels } from './goodput.js';
import { chunksMeasured, overlapOfSmallModel } from './measured-points.js';
import { mostRequests, simulate } from './simulate.js';
import type { SimulationResult } from './simulate.js';
import { simulatedModels, systems } from './systems.js';
import type { SimulatedModelName, SystemName } from './systems.js';
import { poissonTrace } from './trace.js';
import type { AnswerTokens } from './trace.js';

/** The paper's figures that can be simulated, as it numbers them. */
export const figureNames = ['1', '4', '8', '10', '11', '12', '13', '14a', '14b', '15', '16a', '16b'] as const;
export type FigureName = (typeof figureNames)[number];

/** What `simulateFigures` simulates; what is left out is as in `kv simulate`. */
export interface FigureOptions {
  readonly model: SimulatedModelName;
  /** Of each trace. Default 100. */
  readonly requests?: number | undefined;
  /** Default 512: the paper does not say, and of 262, 512 and 1,024 this fits its rates best (docs/methods/serve-simulator.md). */
  readonly answerTokens?: AnswerTokens | undefined;
  /** Of requests and blocks. Default 1. */
  readonly seed?: number | undefined;
  /** Requests a second. Default: some below and above what `base` serves on an H200. */
  readonly rates?: readonly number[] | undefined;
  /** Default: those of one H200. */
  readonly costs?: Costs | undefined;
  /** Called with each table when it is made. */
  readonly onTable?: ((table: FigureTable) => void) | undefined;
  readonly signal?: AbortSignal | undefined;
}

/** What the numbers of a column are. `small-model`: measured, of the small model of this repository. */
export type PointKind = 'simulated' | 'measured' | 'published' | 'small-model';

/** A figure as a table. */
export interface FigureTable {
  readonly figure: FigureName;
  readonly title: string;
  /** Whose times it is simulated by. */
  readonly gpu: string;
  /** The first is what the rows differ by. */
  readonly columns: readonly string[];
  /** Of each column behind the first. */
  readonly kinds: readonly PointKind[];
  readonly rows: readonly (readonly (string | number)[])[];
}

/** All is simulated where no kinds are given. */
type Table = Pick<FigureTable, 'title' | 'columns' | 'rows'> & { readonly kinds?: readonly PointKind[] | undefined };

interface Settings extends BatchOptions {
  readonly name: SimulatedModelName;
  readonly requests: number;
  readonly answerTokens: AnswerTokens;
  readonly rates: readonly number[];
}

const operation = 'simulateFigures';
const mostRates = 1000;
const rates = { 'lwm-7b': [0.3, 0.5, 0.7, 1, 1.4], 'llama3-8b': [0.8, 1.2, 1.6, 2, 2.5] };

const compared = { ...systems, 'all but WC': { ...systems['+LP'], workingSetControl: false } };
type ComparedName = keyof typeof compared;
type Runs = (rate: number, system: ComparedName) => Promise<SimulationResult>;
type Value = (result: SimulationResult) => number;

/**
 * Figures 1, 4, 8, 10 to 13, 14a to 16b of the paper, simulated, and beside that what was measured of 4, 8 and 16b. Runs that
 * figures share are made once.
 * @throws InvalidValueError for a figure or a model that there is not, and other options that are none; the signal's reason
 */
export async function simulateFigures(names: readonly FigureName[], options: FigureOptions): Promise<FigureTable[]> {
  const figures = listOf(operation, 'names', names, figureNames.length ** 2);
  for (const name of figures) expectOneOf('figure', name, figureNames);
  const settings = readOptions(options);
  const { model, requests, answerTokens, seed, costs, signal } = settings;
  const done = new Map<string, Promise<SimulationResult>>();
  const run: Runs = (rate, system) => {
    const key = `${rate} ${system}`;
    const trace = (): ReturnType<typeof poissonTrace> => poissonTrace(requests, rate, model, seed, answerTokens);
    const result = done.get(key) ?? simulate({ model, features: compared[system], trace: trace(), costs, seed, signal });
    done.set(key, result);
    return result;
  };
  const tables: FigureTable[] = [];
  for (const figure of figures) {
    const { kinds, ...made } = await tableOf(figure, settings, run);
    const table: FigureTable = { figure, gpu: costs.gpu, kinds: kinds ?? made.columns.slice(1).map(() => 'simulated'), ...made };
    tables.push(table);
    options.onTable?.(table);
  }
  return tables;
}

/** @throws InvalidValueError */
function readOptions(options: FigureOptions): Settings {
  expectOptions(operation, options, { model: true, requests: true, answerTokens: true, seed: true, rates: true, costs: true, onTable: true, signal: true });
  const { model: name, requests = 100, answerTokens = 512, seed = 1, costs = new Costs(), onTable, signal } = options;
  expectOneOf('model', name, Object.keys(simulatedModels));
  const model = simulatedModels[name];
  const { rates: wanted = rates[name] } = options;
  const given = listOf(operation, 'rates', wanted, mostRates);
  const isWhole = (count: number, least: number, most: number) => Number.isInteger(count) && count >= least && count <= most;
  expectThat(operation, 'requests', requests, isWhole(requests, 1, mostRequests), `a whole number from 1 to ${mostRequests}`);
  const longest = model.contextTokens / 2;
  expectThat(operation, 'answerTokens', answerTokens, answerTokens === 'longbench' || isWhole(answerTokens, 2, longest), `2 to ${longest} tokens, or 'longbench'`);
  expectThat(operation, 'seed', seed, isWhole(seed, 0, Number.MAX_SAFE_INTEGER), 'a whole number from 0 on');
  for (const rate of given) expectThat(operation, 'rates', rate, Number.isFinite(rate) && rate > 0, 'positive numbers of requests a second');
  expectThat(operation, 'costs', costs, Costs.is(costs), 'new Costs()');
  expectCallback(operation, 'onTable', onTable);
  expectSignal(operation, signal);
  return { name, model, requests, answerTokens, seed, rates: given, costs, signal };
}

async function tableOf(name: FigureName, settings: Settings, run: Runs): Promise<Table> {
  switch (name) {
    case '1':
      return await throughputByBatch(settings);
    case '4':
      return linkRates(settings.costs);
    case '8':
      return overlaps(settings);
    case '13':
      return await withinLevel(settings, run);
    case '14a':
      return await loadingByBatch(settings);
    case '14b':
      return await savingByPrompt(settings);
    case '16b':
      return chunkedAttention(settings);
    default:
      return await byRate(name, settings.rates, run);
  }
}

/** What is reckoned with. Each says where it is from. */
function linkRates(costs: Costs): Table {
  const ways = { 'loaded, a copy a block': 'copies', 'loaded, FlashH2D': 'gather', 'saved, a copy a block': 'saveCopies', 'saved, FlashD2H': 'save' } as const;
  const rows = Object.entries(ways).map(([way, name]) => [way, costs.rate(name).rate, costs.rate(name).from]);
  const kind = rows.some(([, , from]) => String(from).startsWith('published')) ? 'published' : 'measured';
  return { title: 'bandwidth of the link', columns: ['blocks of 16 KiB', 'GB/s', 'from'], rows, kinds: [kind, kind] };
}

function overlaps({ model, seed }: Settings): Table {
  const rows = overlapByWindow(model.contextTokens / 32, seed).map(([steps, share], index) => [steps, 100 * share, overlapOfSmallModel[index] ?? NaN]);
  const title = 'of the blocks that a step reads, those that steps before it read too';
  return { title, columns: ['steps before', '%', '% of the small model'], rows, kinds: ['simulated', 'small-model'] };
}

/** With what was measured of the same heads, on the GPU that was measured. */
function chunkedAttention({ name, ...settings }: Settings): Table {
  const table = attentionByChunk(settings);
  const { gpu, shares } = chunksMeasured;
  if (settings.costs.gpu !== gpu) return table;
  const rows = table.rows.map((row, index) => [...row, shares[name][index] ?? NaN]);
  return { ...table, columns: [...table.columns, 'chunks, measured'], rows, kinds: ['simulated', 'simulated', 'measured'] };
}

async function withinLevel({ model, costs }: Settings, run: Runs): Promise<Table> {
  const levels = serviceLevels(model, costs);
  const found: (readonly (string | number)[])[] = [];
  const before = levels.map(() => NaN);
  for (const system of Object.keys(systems) as SystemName[]) {
    const row: (string | number)[] = [system];
    for (const [index, level] of levels.entries()) {
      const rate = await goodput((each) => run(each, system), level);
      row.push(rate, rate / (before[index] ?? NaN));
      before[index] = rate;
    }
    found.push(row);
  }
  const columns = ['system', 'requests/s', 'times the one before', 'the wait as many iterations as on the paper\'s machine', 'times the one before '];
  return { title: 'requests/s within the service level', columns, rows: found };
}

type RateFigure = Exclude<FigureName, '1' | '4' | '8' | '13' | '14a' | '14b' | '16b'>;

async function byRate(name: RateFigure, given: readonly number[], run: Runs): Promise<Table> {
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
  readonly system: ComparedName;
  readonly value: Value;
}

const ofPaper = ['base', '+SA', '+Offload', '+LP'] as const;
const each = (value: Value): Column[] => ofPaper.map((system) => ({ header: system, system, value }));
const firstToken: Value = (result) => result.firstToken;
const perSecond: Value = (result) => result.tokensPerSecond;
const loads: Value = (result) => result.loadsPerStep;

const plans: Record<RateFigure, readonly [title: string, columns: readonly Column[]]> = {
  10: ['mean time to the first token, ms', each(firstToken)],
  11: ['tokens/s', each(perSecond)],
  12: ['mean time between tokens, ms', each((result) => result.betweenTokens)],
  15: [
    'working-set control: tokens/s, and blocks loaded in a step',
    [
      { header: 'tokens/s without', system: 'all but WC', value: perSecond },
      { header: 'with', system: '+LP', value: perSecond },
      { header: 'loads without', system: 'all but WC', value: loads },
      { header: 'with ', system: '+LP', value: loads },
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
  throw new InvalidValueError(`${operation}: ${subject} is ${show(given)}; it must be one of ${wanted.join(', ')}.`, {
    subject,
    given,
    wanted,
  });
}
