import { basename } from 'node:path';

import { readStoredTensors } from '@kv/model';
import type { PointKind } from '@kv/serve-scheduler';

import { askByBudget } from '../bench/ask-by-budget.js';
import type { TaskScore } from '../bench/ask-by-budget.js';
import type { CommandContext } from '../command-context.js';
import { describeDevice } from '../describe-device.js';
import { drawPanels } from '../draw-panels.js';
import { formatCount, formatShare, styled } from '../format.js';
import { openModel } from '../open-model.js';
import type { DeviceChoice } from '../options.js';
import { plainTable } from '../plain-table.js';
import { PrefillBar } from '../prefill-bar.js';
import { writeTextFile } from '../writable-file.js';

export interface BudgetBenchOptions extends DeviceChoice {
  readonly budgets: readonly number[];
  readonly promptTokens?: number | undefined;
  readonly examples?: number | undefined;
  readonly json: boolean;
  readonly svg?: string | undefined;
}

/** Of a model with fewer parameters the paper says nothing. */
const smallModel = 1e9;

/** The paper's Table 1: which share of a model's held-out examples it answers right, by what a step of an answer reads. */
export async function benchBudgets(directory: string, options: BudgetBenchOptions, { stdout, stderr, signal }: CommandContext): Promise<void> {
  const { promptTokens = 8192, examples = 2, json, svg } = options;
  const budgets = [...new Set(options.budgets)];
  using model = await openModel(directory, options);
  const kind = await kindOf(directory);
  const scores = await asked();
  const device = describeDevice(model.device);
  if (svg !== undefined) await writeTextFile(svg, 'svg', draw(scores, budgets, kind, `${basename(directory)}, prompts of ${formatCount(promptTokens)} tokens, on ${device}`));
  if (json) {
    stdout.write(`${JSON.stringify({ kind, device, promptTokens, budgets, tasks: scores }, null, 2)}\n`);
    return;
  }
  stdout.write(`${directory}, ${kind}, on ${device}\n`);
  stdout.write(`right answers to held-out questions behind ${formatCount(promptTokens)} tokens, by the tokens of each kv head that a step reads\n\n`);
  const heads = ['task', 'examples', ...budgets.map(formatCount), 'all'].map((head, index) => ({ head: styled('dim', head), alignment: index === 0 ? ('left' as const) : ('right' as const) }));
  const lines = scores.map((score) => [score.task, formatCount(score.examples), ...shares(score).map(formatShare)]);
  const mean = ['mean of the tasks', formatCount(scores.reduce((sum, each) => sum + each.examples, 0)), ...means(scores).map(formatShare)];
  stdout.writeStyled(`${plainTable(heads, [...lines, mean])}\n`);

  async function asked(): Promise<TaskScore[]> {
    using bar = new PrefillBar(stderr, 'questions', 'examples');
    return await askByBudget(model, { budgets, promptTokens, examples }, signal, (done, total) => bar.update(done, total));
  }
}

/** Right answers under each budget, and where a step reads everything. */
function shares({ examples, right, rightOfAll }: TaskScore): number[] {
  return [...right, rightOfAll].map((count) => count / examples);
}

function means(scores: readonly TaskScore[]): number[] {
  const [first, ...rest] = scores.map(shares);
  const sums = rest.reduce((sum, own) => sum.map((share, index) => share + (own[index] ?? 0)), first ?? []);
  return sums.map((sum) => sum / scores.length);
}

function draw(scores: readonly TaskScore[], budgets: readonly number[], kind: PointKind, where: string): string {
  const labels = [...budgets.map(formatCount), 'all'];
  const table = [...scores.map(shares), means(scores)];
  const rows = labels.map((label, index) => ({ label, values: table.map((ofTask) => 100 * (ofTask[index] ?? NaN)) }));
  const series = [...scores.map(({ task }) => task), 'mean'].map((name) => ({ name, kind }));
  return drawPanels(where, [{ title: 'Table 1: right answers, %', rows, series, below: 'tokens that a step reads' }]);
}

async function kindOf(directory: string): Promise<PointKind> {
  let parameters = 0;
  for (const { shape } of (await readStoredTensors(directory)).values()) parameters += shape.reduce((product, extent) => product * extent, 1);
  return parameters < smallModel ? 'small-model' : 'measured';
}
