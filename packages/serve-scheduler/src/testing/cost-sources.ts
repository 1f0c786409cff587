import type { Costs } from '../simulator/costs.js';
import { measured, reference, rowOf } from './measured-rows.js';

const layers = 32;
const kvHeads = 8;
const queryHeads = 32;
const serving = 'serving-h200.json';
const plans = 'plan-blocks-h200.json';
const choice = 'scores, top 64 blocks and plan of a layer';

/** Bytes of the rows of loads and saves. */
const moved = 2 ** 26;

/** All layers' attention of a step that reads so many tokens. */
export const answersAttention = (costs: Costs, tokens: number): number => layers * costs.milliseconds('decodeAttention', kvHeads * tokens);

/** All layers' attention of tokens of a prompt. */
export const promptAttention = (costs: Costs, first: number, end: number): number =>
  layers * costs.milliseconds('prefillAttention', (queryHeads * (end ** 2 - first ** 2)) / 2 ** 21);

/** First tokens of a prompt's chunks. */
export const chunksOf = (tokens: number, chunk: number): number[] => Array.from({ length: tokens / chunk }, (_, index) => index * chunk);

/**
 * Each entry of h200-costs.json, from the rows that it names. A line that other entries are needed for takes those of the
 * tables, which are entries here too.
 */
export function costsByRows(costs: Costs): Record<string, number> {
  const decode = (of: string): number => measured('attention-h200.json', `decode ${of}`);
  const prefill = (of: string): number => measured('attention-h200.json', `prefill ${of}`);
  const chosen = (of: string): number => measured(serving, `${choice}, ${of}`);
  const rate = (milliseconds: number): number => moved / 1e6 / milliseconds;

  const step = (sequences: number): number => {
    const whole = measured('batched-steps-h200.json', `decode step of ${sequences} sequence${sequences === 1 ? '' : 's'} of 4096 tokens`);
    return whole - answersAttention(costs, sequences * 4096);
  };
  /** Of a prompt that is read in chunks, one of them. */
  const chunk = (promptTokens: number, tokens: number): number => {
    const firsts = chunksOf(promptTokens, tokens);
    const attention = firsts.reduce((sum, first) => sum + promptAttention(costs, first, first + tokens), 0);
    return (measured('model-h200.json', `first token, ${promptTokens} tokens of prompt, f16`) - attention) / firsts.length;
  };
  const placing = (sequences: string, cache: number): number => {
    const missing = rowOf(plans, `${choice}, ${sequences}, 5 % of the chosen blocks missing of a cache of ${cache}`);
    return missing.result.median - measured(plans, `${choice}, ${sequences}`) - missing.forgetting;
  };

  const [alone, eight] = [decode('1x32768'), decode('8x32768')];
  const whole = 'step of 8 sequences of 32768 tokens, all that it reads on the device';
  const sparse = measured(serving, whole) - answersAttention(costs, 8 * 2048) - layers * chosen('8 sequences of 32K');
  const keeping = (sparse - (reference(serving, whole) - answersAttention(costs, 8 * 32_768))) / layers;
  const contiguous = reference(serving, 'saves of 4096 blocks of 2 x 8192 bytes: a copy a block');
  const saved = rowOf(serving, 'a prompt of 32768 tokens saved in host memory, layer segments of 8192 rows');

  return {
    'rows 1': step(1),
    'rows 8': step(8),
    'rows 32': step(32),
    'rows 128': step(128),
    'rows 1024': chunk(1024, 1024),
    'rows 8192': chunk(32_768, 8192),
    'decodeAttention 8192': alone - ((262_144 - 8192) / (2_097_152 - 262_144)) * (eight - alone),
    'decodeAttention 262144': alone,
    'decodeAttention 2097152': eight,
    'prefillAttention 16': (16 / 2048) * prefill('8x4096') + 0.003,
    'prefillAttention 2048': prefill('8x4096'),
    'prefillAttention 16384': prefill('1x32768'),
    'prefillAttention 262144': prefill('1x131072'),
    'selection 1024': chosen('1 sequences of 128K'),
    'selection 32768': chosen('1 sequences of 128K'),
    'selection 65536': chosen('8 sequences of 32K'),
    'selection 262144': chosen('8 sequences of 128K'),
    'keeping 1': keeping,
    'keeping 8': keeping,
    'placing 16384': placing('8 sequences of 32K', 16_384),
    'placing 40960': placing('8 sequences of 32K', 40_960),
    'placing 65536': placing('8 sequences of 128K', 65_536),
    gather: rate(measured(serving, 'loads of 4096 blocks of 2 x 8192 bytes')),
    copies: rate(reference(serving, 'loads of 2048 blocks of 2 x 16384 bytes, beside a copy a block')),
    save: rate(contiguous),
    saveCopies: rate(measured(serving, 'saves of 2048 blocks of 2 x 16384 bytes: a copy a block')),
    besideSaves: (saved.result.median - saved.reference.median) / (64 * contiguous),
  };
}
