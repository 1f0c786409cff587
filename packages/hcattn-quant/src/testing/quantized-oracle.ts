import { blockTokens, type CodeBits, groupDims, quantizedBlockBytes } from '../quantized-blocks.js';

/** The format of quantized blocks, number by number: each operation rounds to f32 as the kernels' do. */

const { fround } = Math;
const groupsOf = (headDim: number) => Math.ceil(headDim / groupDims);

/** What a byte of scale is worth: the upper half of an f16 number, without its sign, times 1/16. */
export const scales = Float64Array.from({ length: 256 }, (_, code) => {
  const [exponent, mantissa] = [code >> 3, code & 7];
  if (exponent === 31) return NaN;
  return exponent === 0 ? mantissa * 2 ** -21 : (8 + mantissa) * 2 ** (exponent - 22);
});
export const largestScale = 0xf7;

/** The first scale that is not below the step. */
function scaleOf(step: number): number {
  if (!Number.isFinite(step)) return 0xff;
  const code = scales.findIndex((scale) => scale >= step);
  return code === -1 ? largestScale : code;
}

/** Dims that are rotated together. */
export function rotationRun(headDim: number): number {
  let run = 1;
  while (headDim % (2 * run) === 0) run *= 2;
  return run;
}

/** 1 or -1, of each dim. */
function signOf(dim: number): number {
  let hash = Math.imul(dim + 1, 0x9e3779b1) >>> 0;
  hash = Math.imul(hash ^ (hash >>> 15), 0x85ebca6b) >>> 0;
  hash = Math.imul(hash ^ (hash >>> 13), 0xc2b2ae35) >>> 0;
  return ((hash ^ (hash >>> 16)) & 1) === 1 ? -1 : 1;
}

const same = (x: number) => x;

/** H row / sqrt(n); `rounded` is Math.fround, or nothing for the real numbers. */
function multipliedByHadamard(row: ArrayLike<number>, rounded: (x: number) => number): Float64Array {
  const product = Float64Array.from(row);
  const run = rotationRun(row.length);
  for (let stride = 1; stride < run; stride *= 2) {
    for (let dim = 0; dim < row.length; dim++) {
      if ((dim & stride) !== 0) continue;
      const [a, b] = [product[dim] ?? NaN, product[dim + stride] ?? NaN];
      product[dim] = rounded(a + b);
      product[dim + stride] = rounded(a - b);
    }
  }
  return product.map((x) => rounded(x * rounded(1 / Math.sqrt(run))));
}

const withSigns = (row: Float64Array) => row.map((x, dim) => x * signOf(dim));

/** The rotated row, in f32 as the kernels compute it, or in float64. */
export function rotated(row: Float64Array, rounded: (x: number) => number = same): Float64Array {
  return multipliedByHadamard(withSigns(row), rounded);
}

function rotatedBack(row: Float64Array): Float64Array {
  return withSigns(multipliedByHadamard(row, fround));
}

export function roundHalfEven(x: number): number {
  const floor = Math.floor(x);
  if (x - floor !== 0.5) return Math.round(x);
  return floor % 2 === 0 ? floor : floor + 1;
}

const clamped = (x: number, least: number, most: number) => Math.min(Math.max(x, least), most);

function codeOf(x: number, step: number, bits: CodeBits): number {
  const steps = step > 0 ? fround(x / step) : 0;
  return bits === 8 ? clamped(roundHalfEven(steps), -127, 127) & 255 : clamped(Math.floor(fround(steps + 8)), 0, 15);
}

/** The bytes of a block whose rows are `[token][dim]`. */
export function quantized(rows: Float64Array, headDim: number, bits: CodeBits): Uint8Array {
  const groups = groupsOf(headDim);
  const bytes = new Uint8Array(quantizedBlockBytes(headDim, bits));
  const groupBytes = (groupDims * bits) / 8;
  for (let token = 0; token < blockTokens; token++) {
    const row = rotated(rows.slice(token * headDim, (token + 1) * headDim), fround);
    for (let group = 0; group < groups; group++) {
      const own = row.slice(group * groupDims, (group + 1) * groupDims);
      const magnitude = own.reduce((most, x) => (Number.isFinite(x) ? Math.max(most, Math.abs(x)) : NaN), 0);
      const scale = scaleOf(fround(magnitude / (bits === 8 ? 127 : 8)));
      const at = token * groups + group;
      bytes[blockTokens * groups * groupBytes + at] = scale;
      for (let dim = 0; dim < groupDims; dim++) {
        const code = codeOf(own[dim] ?? 0, scales[scale] ?? NaN, bits);
        const place = at * groupBytes + (bits === 8 ? dim : dim % 16);
        bytes[place] = (bytes[place] ?? 0) | (bits === 4 && dim >= 16 ? code << 4 : code);
      }
    }
  }
  return bytes;
}

/** The rows of a block, `[token][dim]`, still rotated: exact. */
export function decoded(bytes: Uint8Array, headDim: number, bits: CodeBits): Float64Array {
  const groups = groupsOf(headDim);
  const groupBytes = (groupDims * bits) / 8;
  return Float64Array.from({ length: blockTokens * headDim }, (_, index) => {
    const [token, dim] = [Math.floor(index / headDim), index % headDim];
    const at = token * groups + Math.floor(dim / groupDims);
    const inGroup = dim % groupDims;
    const step = scales[bytes[blockTokens * groups * groupBytes + at] ?? 0] ?? NaN;
    if (bits === 8) return (((bytes[at * groupBytes + inGroup] ?? 0) << 24) >> 24) * step;
    const byte = bytes[at * groupBytes + (inGroup % 16)] ?? 0;
    return ((inGroup < 16 ? byte & 15 : byte >> 4) - 7.5) * step;
  });
}

/** The rows of a block, `[token][dim]`, rotated back in f32. */
export function dequantized(bytes: Uint8Array, headDim: number, bits: CodeBits): Float64Array {
  const rows = decoded(bytes, headDim, bits);
  for (let token = 0; token < blockTokens; token++) {
    rows.set(rotatedBack(rows.slice(token * headDim, (token + 1) * headDim)), token * headDim);
  }
  return rows;
}
