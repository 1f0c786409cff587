import type { ModelConfig, RopeConfig } from '../config/model-config.js';
import type { RandomModel } from './random-model.js';

type Row = Float64Array<ArrayBuffer>;

/**
 * The logits behind every token of one sequence, in f64, by the textbook: slow and obviously right.
 * Written from the equations of the papers (Touvron et al. 2023; RoPE: Su et al. 2021; RMSNorm: Zhang &
 * Sennrich 2019; SwiGLU: Shazeer 2020), not from the runner.
 */
export function referenceLogits(model: RandomModel, ids: ArrayLike<number>): Row[] {
  const { config } = model;
  const weight = (name: string): Float32Array => model.weights.get(name) ?? new Float32Array();
  const linear = (name: string, rows: Row[]): Row[] =>
    rows.map((row) => product(weight(`${name}.weight`), row, weight(`${name}.bias`)));
  const norm = (name: string, rows: Row[]): Row[] =>
    rows.map((row) => rmsNormOf(row, weight(`${name}.weight`), config.rmsNormEpsilon));

  const embedding = weight('model.embed_tokens.weight');
  let hidden = Array.from(ids, (id) =>
    Float64Array.from(embedding.subarray(id * config.hiddenSize, (id + 1) * config.hiddenSize)),
  );
  for (let layer = 0; layer < config.layers; layer += 1) {
    const prefix = `model.layers.${layer}`;
    const normed = norm(`${prefix}.input_layernorm`, hidden);
    const heads = (projection: string, headNorm: string): Row[][] =>
      linear(`${prefix}.self_attn.${projection}`, normed).map((row) =>
        splitHeads(row, config.headDim).map((head) =>
          model.weights.has(`${prefix}.self_attn.${headNorm}.weight`)
            ? rmsNormOf(head, weight(`${prefix}.self_attn.${headNorm}.weight`), config.rmsNormEpsilon)
            : head,
        ),
      );
    const turn = (rows: Row[][]): Row[][] =>
      rows.map((row, position) => row.map((head) => rotated(head, position, config.rope)));
    const queries = turn(heads('q_proj', 'q_norm'));
    const keys = turn(heads('k_proj', 'k_norm'));
    const attended = attention(config, queries, keys, heads('v_proj', 'no norm'));
    hidden = sum(hidden, linear(`${prefix}.self_attn.o_proj`, attended));
    const inner = norm(`${prefix}.post_attention_layernorm`, hidden);
    const gate = linear(`${prefix}.mlp.gate_proj`, inner);
    const up = linear(`${prefix}.mlp.up_proj`, inner);
    const activated = gate.map((row, r) => row.map((x, i) => (x / (1 + Math.exp(-x))) * (up[r]?.[i] ?? NaN)));
    hidden = sum(hidden, linear(`${prefix}.mlp.down_proj`, activated));
  }
  const head = config.tiedHead ? embedding : weight('lm_head.weight');
  return norm('model.norm', hidden).map((row) => product(head, row, new Float32Array()));
}

/** `matrix` is `[out, in]`; an empty bias is none. */
function product(matrix: Float32Array, row: Row, bias: Float32Array): Row {
  return Float64Array.from({ length: matrix.length / row.length }, (_, out) =>
    row.reduce((total, x, i) => total + x * (matrix[out * row.length + i] ?? NaN), bias[out] ?? 0),
  );
}

function rmsNormOf(row: Row, weight: Float32Array, epsilon: number): Row {
  const meanSquare = row.reduce((total, x) => total + x * x, 0) / row.length;
  return row.map((x, i) => (x / Math.sqrt(meanSquare + epsilon)) * (weight[i] ?? NaN));
}

function splitHeads(row: Row, headDim: number): Row[] {
  return Array.from({ length: row.length / headDim }, (_, head) =>
    row.slice(head * headDim, (head + 1) * headDim),
  );
}

/** Pair i is the dims i and i + headDim / 2. */
function rotated(head: Row, position: number, rope: RopeConfig): Row {
  const half = head.length / 2;
  return head.map((x, dim) => {
    const pair = dim % half;
    const angle = position * frequency(pair / half, rope);
    const other = head[dim < half ? dim + half : pair] ?? NaN;
    return x * Math.cos(angle) + (dim < half ? -other : other) * Math.sin(angle);
  });
}

function frequency(exponent: number, { theta, scaling }: RopeConfig): number {
  const plain = theta ** -exponent;
  if (scaling.kind === 'none') return plain;
  if (scaling.kind === 'linear') return plain / scaling.factor;
  const wavelength = (2 * Math.PI) / plain;
  const {
    factor,
    lowFrequencyFactor: low,
    highFrequencyFactor: high,
    originalMaxPositions: trained,
  } = scaling;
  if (wavelength > trained / low) return plain / factor;
  if (wavelength < trained / high) return plain;
  const smooth = (trained / wavelength - low) / (high - low);
  return (1 - smooth) * (plain / factor) + smooth * plain;
}

function attention(config: ModelConfig, queries: Row[][], keys: Row[][], values: Row[][]): Row[] {
  const { queryHeads, kvHeads, headDim } = config;
  return queries.map((heads, position) => {
    const output = new Float64Array(queryHeads * headDim);
    heads.forEach((query, head) => {
      const kvHead = Math.floor((head * kvHeads) / queryHeads);
      const scores = Array.from(
        { length: position + 1 },
        (_, token) => dot(query, keys[token]?.[kvHead]) / Math.sqrt(headDim),
      );
      const largest = Math.max(...scores);
      const weights = scores.map((score) => Math.exp(score - largest));
      const total = weights.reduce((a, b) => a + b, 0);
      weights.forEach((weight, token) => {
        values[token]?.[kvHead]?.forEach((x, dim) => {
          output[head * headDim + dim] = (output[head * headDim + dim] ?? 0) + (weight / total) * x;
        });
      });
    });
    return output;
  });
}

function dot(a: Row, b: Row | undefined): number {
  return a.reduce((total, x, i) => total + x * (b?.[i] ?? NaN), 0);
}

function sum(a: Row[], b: Row[]): Row[] {
  return a.map((row, r) => row.map((x, i) => x + (b[r]?.[i] ?? NaN)));
}
