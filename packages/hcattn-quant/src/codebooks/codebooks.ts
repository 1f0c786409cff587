import { InvalidValueError, type KvLayer, ShapeError } from '@kv/sparse-core';
import { expectObject, expectThat, listOf } from '@kv/sparse-core/native';
import { mostDims } from '../quantized-blocks.js';

/** Of one codebook: what 13 bits name. */
export const mostCentroids = 8192;
/** A safetensors file has two tensors a layer, and at most 16,384. */
const mostLayers = 8192;

/** How codebooks were made. */
export interface CodebookTraining {
  readonly seed: number;
  /** Of mini-batch k-means, at the most. */
  readonly iterations: number;
  /** Vectors of a mini-batch. */
  readonly batchVectors: number;
  /** Keys of each kv head that were read; each gives `groups` vectors. */
  readonly keys: number;
}

/** The codebooks of one layer. */
export interface LayerCodebooks {
  readonly kvHeads: number;
  /** f16 `[kvHead, book, centroid, subDim]`, as their 16 bits. All are finite. */
  readonly centroids: Uint16Array;
  /** f32 `[kvHead, dim]`, finite and above 0: a key is its centroids times this. All 1 where no scale was asked for. */
  readonly scale: Float32Array;
}

/**
 * Product quantization of keys after RoPE (section 3.1). A key of `headDim` dims is cut into `groups` sub-vectors of
 * neighbouring dims, and each of them is replaced by the number of its nearest centroid, `code`:
 *
 *     key[dim] ≈ scale[dim] * centroids[book(dim / subDim), code[dim / subDim], dim % subDim]
 *
 * so that `q . key` is a sum over groups of `(scale * q) . centroid`. The nearest is that of `key / scale`.
 */
export interface Codebooks {
  /** Of the model whose keys these are: `model.fingerprint()`. */
  readonly model: string;
  readonly headDim: number;
  /** Sub-vectors of a key; it divides `headDim`. */
  readonly groups: number;
  /** Codebooks of a kv head: 1, which all groups share, or one for each of `groups`. */
  readonly books: number;
  /** Centroids of a codebook, 2 to 8192. */
  readonly centroids: number;
  readonly layers: readonly LayerCodebooks[];
  readonly training: CodebookTraining;
}

/** Bits of a code: as many as name each centroid. */
export function codeBitsOf(centroids: number): number {
  return Math.ceil(Math.log2(centroids));
}

/** Codebooks that were checked, and whose numbers nobody should have changed since. */
const checked = new WeakSet<Codebooks>();

/**
 * Refuses codebooks that contradict themselves or hold a number that is none.
 * @throws InvalidValueError, ShapeError
 */
export function expectCodebooks(operation: string, given: Codebooks): void {
  expectObject(operation, 'codebooks', given);
  if (checked.has(given)) return;
  const { model, headDim, groups, books, centroids, layers } = given;
  expectFingerprint(operation, 'codebooks.model', model);
  expectSizes(operation, given);
  expectThat(operation, 'codebooks.books', books, books === 1 || books === groups, `1 or ${groups}, the number of groups`);
  for (const [index, layer] of listOf(operation, 'codebooks.layers', layers, mostLayers).entries()) {
    const name = `codebooks.layers[${index}]`;
    expectObject(operation, name, layer);
    const { kvHeads } = layer;
    expectThat(operation, `${name}.kvHeads`, kvHeads, Number.isInteger(kvHeads) && kvHeads > 0, 'a whole number from 1 on');
    expectNumbers(operation, `${name}.centroids`, layer.centroids, {
      length: (kvHeads * books * centroids * headDim) / groups,
      bad: (bits) => (bits & 0x7c00) === 0x7c00,
      wanted: 'finite f16 numbers in a Uint16Array',
      array: Uint16Array,
    });
    expectNumbers(operation, `${name}.scale`, layer.scale, {
      length: kvHeads * headDim,
      bad: (scale) => !(scale > 0 && scale < Infinity),
      wanted: 'finite numbers above 0 in a Float32Array',
      array: Float32Array,
    });
  }
  checked.add(given);
}

/** @throws InvalidValueError */
export function expectFingerprint(operation: string, name: string, given: unknown): void {
  const isFingerprint = typeof given === 'string' && /^[0-9a-f]{64}$/.test(given);
  expectThat(operation, name, given, isFingerprint, 'the fingerprint of a model, 64 hexadecimal digits');
}

/** What of codebooks is chosen. */
export type CodebookSizes = Pick<Codebooks, 'headDim' | 'groups' | 'centroids'>;

/** @throws InvalidValueError when groups do not divide the head, or there are no such codebooks */
export function expectSizes(operation: string, { headDim, groups, centroids }: CodebookSizes): void {
  const between = (given: unknown, least: number, most: number) =>
    Number.isInteger(given) && (given as number) >= least && (given as number) <= most;
  expectThat(operation, 'headDim', headDim, between(headDim, 1, mostDims), `a whole number from 1 to ${mostDims}`);
  const divides = between(groups, 1, headDim) && headDim % groups === 0;
  expectThat(operation, 'groups', groups, divides, `a divisor of the ${headDim} dims of a head`);
  const fits = between(centroids, 2, mostCentroids);
  expectThat(operation, 'centroids', centroids, fits, `a whole number from 2 to ${mostCentroids}`);
}

interface Numbers {
  readonly length: number;
  readonly bad: (number: number) => boolean;
  readonly wanted: string;
  readonly array: typeof Uint16Array | typeof Float32Array;
}

function expectNumbers(operation: string, name: string, given: ArrayLike<number>, { length, bad, wanted, array }: Numbers): void {
  expectThat(operation, name, given, given instanceof array, wanted);
  if (given.length !== length) {
    throw new ShapeError(`${operation}: ${name} has ${given.length} numbers; it must have ${length}.`, {
      subject: name,
      given: given.length,
      wanted: length,
    });
  }
  for (let at = 0; at < length; at++) {
    if (bad(given[at] ?? NaN)) throw notFinite(operation, name, at, wanted);
  }
}

function notFinite(operation: string, name: string, at: number, wanted: string): InvalidValueError {
  return new InvalidValueError(`${operation}: number ${at} of ${name} is not; all must be ${wanted}. Make the codebooks anew.`, {
    subject: name,
    given: at,
    wanted,
  });
}

/**
 * Refuses codebooks that are not of these layers.
 * @throws ShapeError when the number of layers, a layer's heads or their dims differ; InvalidValueError as `expectCodebooks`
 */
export function expectCodebooksOf(operation: string, codebooks: Codebooks, layers: readonly KvLayer[]): void {
  expectCodebooks(operation, codebooks);
  const differ = (what: string, given: number, wanted: number) => {
    if (given === wanted) return;
    throw new ShapeError(
      `${operation}: the codebooks have ${given} ${what}, and the model has ${wanted}. Give those that "kv calibrate" made of it.`,
      { subject: 'codebooks', given, wanted },
    );
  };
  differ('layers', codebooks.layers.length, layers.length);
  layers.forEach(({ headDim, kvHeads }, index) => {
    differ(`dims a head, in layer ${index}`, codebooks.headDim, headDim);
    differ(`kv heads in layer ${index}`, codebooks.layers[index]?.kvHeads ?? 0, kvHeads);
  });
}
