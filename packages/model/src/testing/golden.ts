import { readFile } from 'node:fs/promises';
import { join } from 'node:path';

import { ropeDescription, roundToBf16 } from '@kv/sparse-core';
import type { RopeDescription } from '@kv/sparse-core';
import { readSafetensorsHeader } from '@kv/sparse-core/native';

import { readModelConfig } from '../config/read-model-config.js';
import { goldenDirectory } from './paths.js';

/** What `transformers` computes with one of the reference models. */
export interface Golden {
  /** i32 `[2, 203]`, row by row. */
  readonly ids: readonly Int32Array[];
  /** f32 `[2, 203, vocabulary]`: the logits behind each token. */
  readonly logits: readonly Float32Array[];
  /** 50 prompt ids (those of row 0), then 32 greedy tokens. */
  readonly greedy: Int32Array;
}

export const goldenPromptTokens = 50;
export const goldenModels = ['llama2-mha', 'llama31-gqa', 'mistral', 'qwen2', 'qwen3'] as const;

export const goldenModel = (name: string): string => join(goldenDirectory, name);

/**
 * The frequencies that the reference had. Its `model.to(dtype)` rounded them to the dtype of the weights, as
 * it rounds every buffer; with the exact ones, logits of the bf16 models differ by 0.06 and more. Weights that
 * are loaded in their dtype keep f32 frequencies in transformers too: those are the runner's default.
 */
export async function goldenRope(name: string): Promise<RopeDescription> {
  const config = await readModelConfig(goldenModel(name));
  const exact = ropeDescription({ ...config.rope, headDim: config.headDim });
  const round = { float32: (value: number) => value, float16: roundToF16, bfloat16: roundToBf16 };
  const rounded = round[config.declaredDType as keyof typeof round];
  return { ...exact, inverseFrequencies: exact.inverseFrequencies.map(rounded) };
}

/** To nearest: f16 has 11 significant bits, and below 2^-14 steps of 2^-24. */
function roundToF16(value: number): number {
  const step = 2 ** Math.max(Math.floor(Math.log2(value)) - 10, -24);
  return Math.round(value / step) * step;
}

export async function readGolden(name: string): Promise<Golden> {
  const file = join(goldenDirectory, name, 'golden.safetensors');
  const [bytes, { tensors }] = await Promise.all([readFile(file), readSafetensorsHeader(file)]);
  const values = (tensor: string): ArrayBuffer => {
    const { byteOffset = 0, byteLength = 0 } = tensors.get(tensor) ?? {};
    return Uint8Array.from(bytes.subarray(byteOffset, byteOffset + byteLength)).buffer;
  };
  const halves = <Array extends Int32Array | Float32Array>(array: Array): Array[] =>
    [0, 1].map((row) => array.subarray((row * array.length) / 2, ((row + 1) * array.length) / 2) as Array);
  return {
    ids: halves(new Int32Array(values('ids'))),
    logits: halves(new Float32Array(values('logits'))),
    greedy: new Int32Array(values('greedy')),
  };
}

/** The largest absolute difference of two equally long arrays; NaN when there is one. */
export function largestDifference(a: ArrayLike<number>, b: ArrayLike<number>): number {
  if (a.length !== b.length) throw new Error(`${a.length} and ${b.length} numbers cannot be compared`);
  let largest = 0;
  for (let index = 0; index < a.length; index += 1) {
    const difference = Math.abs((a[index] ?? NaN) - (b[index] ?? NaN));
    if (Number.isNaN(difference)) return NaN;
    largest = Math.max(largest, difference);
  }
  return largest;
}
