import type { Costs } from './costs.js';
import { closedLoop } from './closed-loop.js';
import type { ClosedLoopResult } from './closed-loop.js';
import { storeKernel } from './measured-points.js';
import { simulate } from './simulate.js';
import { systems } from './systems.js';
import type { SimulatedModel, SystemFeatures } from './systems.js';

export interface BatchOptions {
  readonly model: SimulatedModel;
  readonly costs: Costs;
  readonly seed: number;
  readonly signal?: AbortSignal | undefined;
}

interface BatchTable {
  readonly title: string;
  readonly columns: readonly string[];
  readonly rows: readonly (readonly number[])[];
}

const withoutControl: SystemFeatures = { ...systems['+LP'], workingSetControl: false };

/** Fig. 1: more and more answers in a step, until their blocks no longer fit. */
export async function throughputByBatch(options: BatchOptions): Promise<BatchTable> {
  const rows: number[][] = [];
  for (const answers of [2, 4, 6, 8, 10, 12, 16, 24]) {
    const { tokensPerSecond, loadsPerStep } = await closedLoop({ ...options, features: withoutControl, answers });
    rows.push([answers, tokensPerSecond, loadsPerStep]);
  }
  return { title: 'answers in a step, without working-set control', columns: ['answers', 'tokens/s', 'blocks loaded a step'], rows };
}

/** Fig. 14a: what a step waits for its blocks. */
export async function loadingByBatch(options: BatchOptions): Promise<BatchTable> {
  const rows: number[][] = [];
  for (const answers of [2, 4, 6, 8, 10]) {
    const [copies, gather] = await Promise.all(
      [false, true].map((fastTransfer): Promise<ClosedLoopResult> => {
        return closedLoop({ ...options, features: { ...withoutControl, fastTransfer }, answers });
      }),
    );
    if (copies && gather) rows.push([answers, copies.milliseconds, copies.loading, gather.milliseconds, gather.loading]);
  }
  const columns = ['answers', 'a copy a block: step, ms', 'of it loading, ms', 'FlashH2D: step, ms', 'of it loading'];
  return { title: 'time of a step, and what of it loads blocks', columns, rows };
}

/** Fig. 14b: what saving all layers of a prompt adds to reading it. Beside a store kernel, where one was measured, computing is slower still. */
export async function savingByPrompt({ model, costs, seed, signal }: BatchOptions): Promise<BatchTable> {
  const rows: number[][] = [];
  const isMeasured = costs.gpu === storeKernel.gpu;
  const { gigabytesPerSecond, slowed } = storeKernel;
  for (const promptTokens of [4096, 8192, 16_384, 32_000]) {
    const trace = [{ milliseconds: 0, promptTokens, maxTokens: 2 }];
    const read = async (features: SystemFeatures): Promise<number> => (await simulate({ model, features, trace, costs, seed, signal })).firstToken;
    const computing = await read(systems['+SA']);
    const storing = (4 * promptTokens * model.layers * model.kvHeads * model.headDim) / (1e6 * gigabytesPerSecond);
    const saved = await read(systems['+FT']);
    const beside = saved + (storing * slowed) / (1 + slowed);
    const times = [await read(systems['+Offload']), saved, ...(isMeasured ? [beside] : [])];
    rows.push([promptTokens, ...times.map((time) => time / computing)]);
  }
  const columns = ['tokens', 'a copy a block', 'FlashD2H', ...(isMeasured ? ['a store kernel'] : [])];
  return { title: 'time of a prompt that is saved, in that of one that is not', columns, rows };
}

/** Fig. 16b: attention of a prompt that is read in chunks, in that of one piece, and in layer segments, which read one piece of each layer. */
export function attentionByChunk({ model, costs }: BatchOptions): BatchTable {
  const promptTokens = 32_768;
  const attention = (chunk: number): number => {
    const parts = Array.from({ length: promptTokens / chunk }, (_, index) => (chunk * (2 * index + 1) * chunk) / 2);
    return parts.reduce((sum, pairs) => sum + costs.milliseconds('prefillAttention', (model.queryHeads * pairs) / 2 ** 20), 0);
  };
  const whole = attention(promptTokens);
  const rows = [512, 1024, 2048, 4096].map((chunk) => [chunk, attention(chunk) / whole, 1]);
  return { title: 'attention of a prompt of 32,768 tokens, in that of one piece', columns: ['tokens of a chunk', 'chunks', 'layer segments'], rows };
}
