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
const signs = Float64Array.from({ length: 1024 }, (_, dim) => {
  let hash = Math.imul(dim + 1, 0x9e3779b1) >>> 0;
  hash = Math.imul(hash ^ (hash >>> 15), 0x85ebca6b) >>> 0;
  hash = Math.imul(hash ^ (hash >>> 13), 0xc2b2ae35) >>> 0;
  return ((hash ^ (hash >>> 16)) & 1) === 1 ? -1 : 1;
});

const same = (x: number) => x;

/** H row / sqrt(n); `rounded` is Math.fround, or nothing for the real numbers. */
function multipliedByHadamard(row: ArrayLike<number>, rounded: (x: number) => number): Float64Array {
  const product = new Float64Array(row);
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

const withSigns = (row: Float64Array) => row.map((x, dim) => x * (signs[dim] ?? NaN));

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

/** How many steps the largest magnitude of a group has. */
export const largestSteps: Readonly<Record<CodeBits, number>> = { 8: 127, 4: 8, 3: 4, 2: 2.5 };

function codeOf(x: number, step: number, bits: CodeBits): number {
  const steps = step > 0 ? fround(x / step) : 0;
  if (bits === 8) return clamped(roundHalfEven(steps), -127, 127) & 255;
  const negative = 2 ** (bits - 1);
  return clamped(Math.floor(fround(steps + negative)), 0, 2 * negative - 1);
}

/** Which bit of a block is bit `bit` of the code of a dim. */
function placeOf(token: number, dim: number, bit: number, headDim: number, bits: CodeBits): number {
  const groups = groupsOf(headDim);
  if (bits === 8) return 8 * (token * groups * groupDims + dim) + bit;
  if (bits === 4) return 8 * ((token * groups + Math.floor(dim / 32)) * 16 + (dim % 16)) + (dim % 32 < 16 ? 0 : 4) + bit;
  const pairs = Math.ceil(headDim / 64);
  const pair = token * pairs + Math.floor(dim / 64);
  const sixteen = Math.floor((dim % 64) / 16);
  if (bit < 2) return 8 * (pair * 16 + (dim % 16)) + 2 * sixteen + bit;
  return 8 * (blockTokens * pairs * 16 + pair * 8 + (dim % 8)) + 4 * (Math.floor(dim / 8) % 2) + sixteen;
}

/** The bytes of a block whose rows are `[token][dim]`, rotated or plain. */
export function quantized(rows: Float64Array, headDim: number, bits: CodeBits, isRotated = true): Uint8Array {
  const groups = groupsOf(headDim);
  const bytes = new Uint8Array(quantizedBlockBytes(headDim, bits));
  const firstScale = bytes.length - blockTokens * groups;
  const dims = bits < 4 ? Math.ceil(headDim / 64) * 64 : groups * groupDims;
  for (let token = 0; token < blockTokens; token++) {
    const given = rows.slice(token * headDim, (token + 1) * headDim);
    const row = isRotated ? rotated(given, fround) : given;
    for (let group = 0; group < groups; group++) {
      const own = row.slice(group * groupDims, (group + 1) * groupDims);
      const magnitude = own.reduce((most, x) => (Number.isFinite(x) ? Math.max(most, Math.abs(x)) : NaN), 0);
      const scale = scaleOf(fround(magnitude / largestSteps[bits]));
      bytes[firstScale + token * groups + group] = scale;
    }
    for (let dim = 0; dim < dims; dim++) {
      const group = Math.floor(dim / groupDims);
      const step = group < groups ? (scales[bytes[firstScale + token * groups + group] ?? 0] ?? NaN) : 0;
      const code = codeOf(row[dim] ?? 0, step, bits);
      for (let bit = 0; bit < bits; bit++) {
        const place = placeOf(token, dim, bit, headDim, bits);
        bytes[place >> 3] = (bytes[place >> 3] ?? 0) | (((code >> bit) & 1) << (place & 7));
      }
    }
  }
  return bytes;
}

const places = new Map<string, Uint32Array>();

/** `placeOf` of every bit of a block, `[token][dim][bit]`. */
function placesOf(headDim: number, bits: CodeBits): Uint32Array {
  const known = places.get(`${headDim} ${bits}`);
  if (known !== undefined) return known;
  const all = new Uint32Array(blockTokens * headDim * bits);
  for (let index = 0; index < all.length; index++) {
    const element = Math.floor(index / bits);
    all[index] = placeOf(Math.floor(element / headDim), element % headDim, index % bits, headDim, bits);
  }
  places.set(`${headDim} ${bits}`, all);
  return all;
}

/** The rows of a block, `[token][dim]`, still rotated: exact. */
export function decoded(bytes: Uint8Array, headDim: number, bits: CodeBits): Float64Array {
  const groups = groupsOf(headDim);
  const firstScale = bytes.length - blockTokens * groups;
  const all = placesOf(headDim, bits);
  const rows = new Float64Array(blockTokens * headDim);
  for (let index = 0; index < rows.length; index++) {
    const token = Math.floor(index / headDim);
    const group = Math.floor((index % headDim) / groupDims);
    const step = scales[bytes[firstScale + token * groups + group] ?? 0] ?? NaN;
    let code = 0;
    for (let bit = 0; bit < bits; bit++) {
      const place = all[index * bits + bit] ?? 0;
      code |= (((bytes[place >> 3] ?? 0) >> (place & 7)) & 1) << bit;
    }
    rows[index] = (bits === 8 ? (code << 24) >> 24 : code - 2 ** (bits - 1) + 0.5) * step;
  }
  return rows;
}

/** The rows of a block, `[token][dim]`, rotated back in f32 if they are rotated. */
export function dequantized(bytes: Uint8Array, headDim: number, bits: CodeBits, isRotated = true): Float64Array {
  const rows = decoded(bytes, headDim, bits);
  if (!isRotated) return rows;
  for (let token = 0; token < blockTokens; token++) {
    rows.set(rotatedBack(rows.slice(token * headDim, (token + 1) * headDim)), token * headDim);
  }
  return rows;
}
