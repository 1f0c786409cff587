import { basename } from 'node:path';

import { CapabilityError, InvalidValueError, OutOfMemoryError } from '@kv/sparse-core';

import { drawLoads } from '../bench/draw-loads.js';
import { measureLoad } from '../bench/measure-load.js';
import type { MeasuredLoad } from '../bench/measure-load.js';
import type { CommandContext } from '../command-context.js';
import { describeDevice } from '../describe-device.js';
import { describeError } from '../describe-error.js';
import { formatBytes, formatCount, formatRate, formatSeconds, formatShare, styled } from '../format.js';
import { openModel } from '../open-model.js';
import type { DeviceChoice } from '../options.js';
import { plainTable } from '../plain-table.js';
import type { PlainColumn } from '../plain-table.js';
import { PrefillBar } from '../prefill-bar.js';
import { expectWritableFile, writeTextFile } from '../writable-file.js';
import { benchBudgets } from './bench-budgets.js';

export interface BenchOptions extends DeviceChoice {
  readonly policy: readonly string[];
  readonly requests: readonly number[];
  readonly promptTokens?: number | undefined;
  readonly answerTokens: number;
  readonly budgets?: readonly number[] | undefined;
  readonly examples?: number | undefined;
  readonly seed: number;
  readonly json: boolean;
  readonly svg?: string | undefined;
}

/** What stands for the methods, and needs no file beside the model. */
export const benchPolicies = ['dense', 'int8', 'hbw-1/4', 'offload-1/4'];
export const benchRequests = [1, 8];
/** Memory for more would be asked for part by part, until there is none: far more than a server takes. */
export const mostAtOnce = 4096;

interface Column extends PlainColumn {
  readonly cell: (load: MeasuredLoad) => string;
}

const column = (head: string, cell: Column['cell'], alignment: Column['alignment'] = 'right'): Column => ({ head, cell, alignment });

const columns: readonly Column[] = [
  column('policy', ({ policy }) => policy, 'left'),
  column('requests', ({ requests }) => formatCount(requests)),
  column('first token', ({ firstToken }) => formatSeconds(firstToken / 1000)),
  column('between tokens', ({ betweenTokens }) => (betweenTokens === undefined ? '–' : `${betweenTokens.toFixed(2)} ms`)),
  column('tokens/s', ({ tokensPerSecond }) => formatRate(tokensPerSecond)),
  column('KV cache', ({ kvBytes }) => (kvBytes === undefined ? '–' : formatBytes(kvBytes.device))),
  column('room', ({ reservedBytes }) => formatBytes(reservedBytes.device)),
];
const loaded = column('loaded', ({ loadedShare }) => (loadedShare === undefined ? '–' : formatShare(loadedShare)));
const hostBytesOf = ({ kvBytes }: MeasuredLoad): number => kvBytes?.host ?? 0;
const onHost = column('on the host', (load) => (hostBytesOf(load) === 0 ? '–' : formatBytes(hostBytesOf(load))));

/**
 * `kv bench`: serves requests that come at once, under each policy, by an engine on this machine, and says what that takes.
 * What a policy cannot do with this model leaves the rows of the others. With budgets it asks the model's held-out examples instead.
 * @throws KvError of any class for a bad option or model, and when no policy could be measured; the signal's reason when interrupted
 */
export async function bench(directory: string, options: BenchOptions, context: CommandContext): Promise<void> {
  const { budgets, examples, svg } = options;
  if (svg !== undefined) await expectWritableFile(svg, 'svg');
  if (budgets !== undefined) {
    await benchBudgets(directory, { ...options, budgets }, context);
    return;
  }
  if (examples === undefined) {
    await benchLoads(directory, options, context);
    return;
  }
  throw new InvalidValueError('--examples are asked with --budgets. Give these, too, or leave both out.', { subject: 'examples', given: examples });
}

async function benchLoads(directory: string, options: BenchOptions, { stdout, stderr, signal }: CommandContext): Promise<void> {
  const { policy, requests, promptTokens = 2048, answerTokens, seed, json, svg } = options;
  using model = await openModel(directory, options);
  const { maxPositions } = model.config;
  if (promptTokens + answerTokens > maxPositions) {
    throw new InvalidValueError(
      `--prompt-tokens and --answer-tokens are ${promptTokens} and ${answerTokens}; the model's context has ${maxPositions} tokens for both. Give fewer.`,
      { subject: 'prompt-tokens', given: promptTokens + answerTokens, wanted: maxPositions },
    );
  }
  const loads: MeasuredLoad[] = [];
  for (const name of policy) {
    for (const count of requests) {
      using bar = new PrefillBar(stderr, `${name}, ${count} at once`);
      let tokens = 0;
      const total = count * answerTokens;
      const load = { policy: name, requests: count, promptTokens, answerTokens, seed };
      try {
        loads.push(await measureLoad(model, load, signal, () => bar.update(++tokens, total)));
      } catch (error) {
        if (!(error instanceof CapabilityError || error instanceof OutOfMemoryError)) throw error;
        stderr.write(`${name}, ${count} at once: left out. ${describeError(error)}\n`);
      }
    }
  }
  if (loads.length === 0) throw new CapabilityError('No policy could be measured; the lines above say why.', { subject: 'policy', given: policy });
  const device = describeDevice(model.device);
  if (svg !== undefined) await writeTextFile(svg, 'svg', drawLoads(loads, `${basename(directory)} on ${device}`));
  if (json) {
    stdout.write(`${JSON.stringify({ kind: 'measured', device, loads }, null, 2)}\n`);
    return;
  }
  stdout.write(`${directory}, measured on ${device}\n`);
  stdout.write(`prompts of ${formatCount(promptTokens)} random tokens that come at once, answers of ${formatCount(answerTokens)}\n\n`);
  const own = [
    ...(loads.some((load) => hostBytesOf(load) > 0) ? [onHost] : []),
    ...(loads.some(({ loadedShare }) => loadedShare !== undefined) ? [loaded] : []),
  ];
  const shown = [...columns, ...own];
  const heads = shown.map(({ head, alignment }) => ({ head: styled('dim', head), alignment }));
  stdout.writeStyled(`${plainTable(heads, loads.map((load) => shown.map(({ cell }) => cell(load))))}\n`);
}
