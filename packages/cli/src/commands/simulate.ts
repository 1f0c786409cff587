import { InvalidValueError } from '@kv/sparse-core';
import { Costs, figureNames, paperCosts, readTrace, simulate, simulatedModels, simulateFigures, systems } from '@kv/serve-scheduler';
import type { AnswerTokens, FigureName, FigureTable, PointKind, SimulatedModelName } from '@kv/serve-scheduler';
import Table from 'cli-table3';

import type { CommandContext } from '../command-context.js';
import { drawFigures } from '../draw-figures.js';
import { formatCount } from '../format.js';
import { parseJson } from '../parse-json.js';
import { readTextFile } from '../read-text-file.js';
import { expectWritableFile, writeTextFile } from '../writable-file.js';

export interface SimulateOptions {
  readonly model: SimulatedModelName;
  readonly figure?: readonly FigureName[] | undefined;
  readonly trace?: string | undefined;
  readonly gpu?: keyof typeof simulatedGpus | undefined;
  readonly costs?: string | undefined;
  readonly answers: string;
  readonly requests: number;
  readonly rates?: readonly string[] | undefined;
  readonly seed: number;
  readonly json: boolean;
  readonly svg?: string | undefined;
}

/** The cost tables that are there without a file. */
export const simulatedGpus = { h200: () => new Costs(), a100: paperCosts };

const mostAnswerTokens = 16_384;

/** A figure, or what a trace took. */
type SimulatedTable = Omit<FigureTable, 'figure'> & { readonly figure?: FigureName | undefined };

/**
 * `kv simulate`: how systems with more and more of SparseServe serve the same requests.
 * @throws InvalidValueError for a malformed trace, whose line it names, malformed cost tables, or those of another GPU; the signal's reason
 */
export async function simulateServing(options: SimulateOptions, { stdout, signal }: CommandContext): Promise<void> {
  const { model, figure = figureNames, requests, seed, json, svg } = options;
  const costs = await costsOf(options, signal);
  if (svg !== undefined) await expectWritableFile(svg, 'svg');
  const print = (table: SimulatedTable): void => {
    if (!json) stdout.write(`${format(table, model)}\n`);
  };
  const printJson = (tables: readonly SimulatedTable[]): void => {
    if (json) stdout.write(`${JSON.stringify(tables, null, 2)}\n`);
  };
  if (options.trace !== undefined) {
    const table = await serveTrace(await readTextFile('trace', options.trace, signal), model, costs, { seed, signal });
    print(table);
    printJson([table]);
    return;
  }
  const settings = { model, requests, answerTokens: answersOf(options.answers), seed, rates: ratesOf(options.rates), costs, signal };
  const tables = await simulateFigures(figure, { ...settings, onTable: print });
  printJson(tables);
  if (svg !== undefined) await writeTextFile(svg, 'svg', drawFigures(tables, model));
}

async function costsOf({ gpu, costs }: SimulateOptions, signal: AbortSignal): Promise<Costs> {
  const named = gpu && simulatedGpus[gpu]();
  if (costs === undefined) return named ?? new Costs();
  const given = parseJson(await readTextFile('cost table', costs, signal));
  if (given !== undefined) return new Costs(given, named?.gpu);
  throw new InvalidValueError(`${costs} is no JSON; wanted cost tables of a GPU as JSON.`, { subject: 'costs', given: costs });
}

function answersOf(text: string): AnswerTokens {
  const tokens = Number(text);
  if (text === 'longbench') return text;
  if (Number.isInteger(tokens) && tokens > 1 && tokens <= mostAnswerTokens) return tokens;
  const wanted = `2 to ${mostAnswerTokens} tokens, or longbench`;
  throw new InvalidValueError(`--answers: given '${text}', wanted ${wanted}.`, { subject: 'answers', given: text, wanted });
}

function ratesOf(given: readonly string[] | undefined): number[] | undefined {
  return given?.map((text) => {
    const rate = Number(text);
    if (rate > 0 && rate < Infinity) return rate;
    throw new InvalidValueError(`--rates: given '${text}', wanted positive numbers of requests a second.`, { subject: 'rates', given: text });
  });
}

async function serveTrace(
  text: string,
  name: SimulatedModelName,
  costs: Costs,
  rest: { readonly seed: number; readonly signal: AbortSignal },
): Promise<SimulatedTable> {
  const trace = readTrace(text);
  const rows: (string | number)[][] = [];
  for (const [system, features] of Object.entries(systems)) {
    const result = await simulate({ model: simulatedModels[name], features, trace, costs, ...rest });
    const { firstToken, queueing, betweenTokens, betweenTokens99, tokensPerSecond, loadsPerStep } = result;
    rows.push([system, firstToken, queueing, betweenTokens, betweenTokens99, tokensPerSecond, loadsPerStep]);
  }
  const columns = ['system', 'first token, ms', 'waiting, ms', 'between tokens, ms', 'P99, ms', 'tokens/s', 'loads a step'];
  const kinds = columns.slice(1).map((): PointKind => 'simulated');
  return { title: `a trace of ${formatCount(trace.length)} requests`, gpu: costs.gpu, columns, kinds, rows };
}

function format({ figure, title, kinds, gpu, columns, rows }: SimulatedTable, model: string): string {
  const right = columns.map((_, index) => (index === 0 ? 'left' : 'right'));
  const table = new Table({ head: [...columns], colAligns: right, style: { head: [], border: [], compact: true } });
  for (const row of rows) table.push(row.map(shown));
  const kind = [...new Set(kinds)].join(' and ');
  return `${figure === undefined ? '' : `Figure ${figure}: `}${title} (${model}, ${kind}, by times of ${gpu})\n${table.toString()}\n`;
}

/** Three digits that say something. */
function shown(value: string | number): string {
  if (typeof value === 'string') return value;
  if (Number.isNaN(value)) return '';
  return Math.abs(value) < 100 ? String(Number(value.toPrecision(3))) : formatCount(Math.round(value));
}
