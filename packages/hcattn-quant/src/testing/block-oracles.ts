import type { KvBytes } from '@kv/sparse-core';
import { decode, encode } from '@kv/sparse-core/testing';
import { codeBitsOf, type Codebooks } from '../codebooks/codebooks.js';
import { codedBlockBytes } from '../coded-keys.js';
import type { CodedOptions } from '../hc-attention-options.js';
import { blockTokens, type CodeBits, quantizedBlockBytes } from '../quantized-blocks.js';
import { dequantized, quantized, roundHalfEven } from './quantized-oracle.js';

export type Operand = 'keys' | 'values';

/** How blocks that left the window are held. */
export interface BlockOracle {
  /** Of one block's keys and values. */
  readonly bytes: KvBytes;
  /** What is held of a block, `[token, dim]`. */
  decoded(operand: Operand, rows: Float64Array): Float64Array;
  /** What the codes of its keys say, by which tokens are chosen, where the keys themselves are held too. */
  readonly chosenBy?: ((rows: Float64Array) => Float64Array) | undefined;
}

/** Keys and values in codes of 8 or 4 bits. */
export function quantizedOracle(headDim: number, bits: Readonly<Record<Operand, CodeBits>>): BlockOracle {
  return {
    bytes: { device: quantizedBlockBytes(headDim, bits.keys) + quantizedBlockBytes(headDim, bits.values), host: 0 },
    decoded: (operand, rows) => dequantized(quantized(rows, headDim, bits[operand]), headDim, bits[operand]),
  };
}

/** How keys are held on the device where values are on the host. */
export interface KeysOracle {
  readonly headDim: number;
  /** Of a block. */
  readonly bytes: number;
  /** What the codes of a block say, `[token, dim]`. */
  readonly decoded: (rows: Float64Array) => Float64Array;
}

/** Those of a kv head of the first layer in codes of codebooks. */
export function codebookKeys(codebooks: Codebooks, kvHead: number): KeysOracle {
  const { headDim, groups, centroids } = codebooks;
  const bytes = codedBlockBytes(groups, codeBitsOf(centroids));
  return { headDim, bytes, decoded: (rows) => nearest(codebooks, kvHead, rows) };
}

export function integerKeys(headDim: number, bits: CodeBits, rotated: boolean): KeysOracle {
  const bytes = quantizedBlockBytes(headDim, bits);
  return { headDim, bytes, decoded: (rows) => dequantized(quantized(rows, headDim, bits, rotated), headDim, bits, rotated) };
}

/** Keys in codes, values as they are or in 8 bits, on the host. */
export function codedOracle(keys: KeysOracle, { values, missingMass, hostKeys }: Partial<CodedOptions>): BlockOracle {
  const { headDim, bytes: keyBytes, decoded: chosenBy } = keys;
  const coded = values === 'int8';
  const meanBytes = missingMass === 'meanValue' ? headDim * (4 + 2) : 0;
  const valueBytes = blockTokens * headDim * (coded ? 1 : 2) + meanBytes;
  const scaleBytes = coded ? 2 * blockTokens : 0;
  const decodedValues = (rows: Float64Array) => (coded ? inEightBits(rows, headDim) : rows.slice());
  if (hostKeys === true) {
    return {
      bytes: { device: keyBytes, host: valueBytes + scaleBytes + 2 * blockTokens * headDim },
      decoded: (operand, rows) => (operand === 'keys' ? rows.slice() : decodedValues(rows)),
      chosenBy,
    };
  }
  return {
    bytes: { device: keyBytes + scaleBytes, host: valueBytes },
    decoded: (operand, rows) => (operand === 'keys' ? chosenBy(rows) : decodedValues(rows)),
  };
}

/** Of each sub-vector the nearest centroid, times the channels' scale. */
function nearest({ headDim, groups, books, centroids, layers: [layer] }: Codebooks, kvHead: number, rows: Float64Array): Float64Array {
  const dims = headDim / groups;
  const numbers = decode('f16', layer?.centroids ?? new Uint16Array());
  const scales = layer?.scale.subarray(kvHead * headDim, (kvHead + 1) * headDim) ?? new Float32Array();
  const scaled = rows.map((x, index) => Math.fround(x / (scales[index % headDim] ?? NaN)));
  const found = new Float64Array(rows.length);
  for (let first = 0; first < rows.length; first += dims) {
    const book = books === 1 ? 0 : (first % headDim) / dims;
    const bookAt = (kvHead * books + book) * centroids * dims;
    let [best, bestDistance] = [0, Infinity];
    for (let code = 0; code < centroids; code++) {
      let distance = 0;
      for (let dim = 0; dim < dims; dim++) distance += ((scaled[first + dim] ?? NaN) - (numbers[bookAt + code * dims + dim] ?? NaN)) ** 2;
      if (distance < bestDistance) [best, bestDistance] = [code, distance];
    }
    for (let dim = 0; dim < dims; dim++) {
      found[first + dim] = (numbers[bookAt + best * dims + dim] ?? NaN) * (scales[(first + dim) % headDim] ?? NaN);
    }
  }
  return found;
}

/** Each token in multiples of 1/127 of its largest magnitude, rounded up to bf16. */
function inEightBits(rows: Float64Array, headDim: number): Float64Array {
  const rounded = new Float64Array(rows.length);
  for (let first = 0; first < rows.length; first += headDim) {
    const row = rows.subarray(first, first + headDim);
    const step = Math.fround(row.reduce((most, x) => Math.max(most, Math.abs(x)), 0) / 127);
    const [near = 0] = decode('bf16', encode('bf16', [step]));
    const bits = encode('bf16', [near])[0] ?? 0;
    const scale = near >= step ? near : (decode('bf16', Uint16Array.of(bits + 1))[0] ?? NaN);
    row.forEach((x, dim) => {
      rounded[first + dim] = scale > 0 ? Math.fround(roundHalfEven(Math.fround(x / scale)) * scale) : 0;
    });
  }
  return rounded;
}
