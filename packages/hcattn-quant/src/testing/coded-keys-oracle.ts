import { decode } from '@kv/sparse-core/testing';
import { codedBlockBytes, quadGroups, spoiltBytes } from '../coded-keys.js';
import { blockTokens } from '../quantized-blocks.js';

const [chunkGroups, streamCodes, octets] = [16, 32, 8];

/** The word and the bit in it at which each code of a coded block begins: the format, written down a second time. */
function placeOf(token: number, group: number, groups: number, codeBits: number): { word: number; next: number; bit: number } {
  const chunk = Math.floor(group / chunkGroups);
  const whole = Math.ceil(groups / quadGroups) * quadGroups;
  const quads = Math.min(chunkGroups, whole - chunk * chunkGroups) / quadGroups;
  const stream = (Math.floor(token / quadGroups) % octets) * quads + Math.floor((group % chunkGroups) / quadGroups);
  const place = Math.floor(token / streamCodes) * 16 + (token % quadGroups) * quadGroups + (group % quadGroups);
  const bit = place * codeBits;
  const word = chunk * streamCodes * codeBits + Math.floor(bit / 32) * octets * quads + stream;
  return { word, next: word + octets * quads, bit: bit % 32 };
}

const codesBytes = (groups: number, codeBits: number) => codedBlockBytes(groups, codeBits) - spoiltBytes;

/** One block of the bytes of a pool. */
export class PooledBlock {
  readonly codes: Uint8Array;
  /** A bit for each token. */
  readonly spoilt: Uint8Array;

  constructor(pool: Uint8Array, block: number, groups: number, codeBits: number) {
    const bytes = codesBytes(groups, codeBits);
    const spoilt = (pool.length / (bytes + spoiltBytes)) * bytes + block * spoiltBytes;
    this.codes = pool.subarray(block * bytes, (block + 1) * bytes);
    this.spoilt = pool.subarray(spoilt, spoilt + spoiltBytes);
  }

  isSpoilt(token: number): boolean {
    return (((this.spoilt[token >> 3] ?? NaN) >> (token % 8)) & 1) === 1;
  }

  /** Writes `[token][group]` codes, with -1 where there is none. */
  write(codes: ArrayLike<number>, groups: number, codeBits: number): void {
    this.codes.set(packed(Array.from(codes, (code) => Math.max(code, 0)), groups, codeBits));
    this.spoilt.fill(0);
    Array.from(codes).forEach((code, index) => {
      const token = Math.floor(index / groups);
      if (code < 0) this.spoilt[token >> 3] = (this.spoilt[token >> 3] ?? 0) | (1 << (token % 8));
    });
  }
}

/** The codes `[token][group]` of a block as they lie in it. */
function packed(codes: ArrayLike<number>, groups: number, codeBits: number): Uint8Array {
  const words = new Uint32Array(codesBytes(groups, codeBits) / 4);
  for (let index = 0; index < blockTokens * groups; index++) {
    const { word, next, bit } = placeOf(Math.floor(index / groups), index % groups, groups, codeBits);
    const code = BigInt(codes[index] ?? NaN) << BigInt(bit);
    words[word] = (words[word] ?? 0) | Number(code & 0xffffffffn);
    if (code >> 32n > 0n) words[next] = (words[next] ?? 0) | Number(code >> 32n);
  }
  return new Uint8Array(words.buffer);
}

/** The codes of a coded block, `[token][group]`. */
export function unpacked(bytes: Uint8Array, groups: number, codeBits: number): Uint16Array {
  const words = new Uint32Array(bytes.slice().buffer);
  return Uint16Array.from({ length: blockTokens * groups }, (_, index) => {
    const { word, next, bit } = placeOf(Math.floor(index / groups), index % groups, groups, codeBits);
    const both = BigInt(words[word] ?? 0) | (BigInt(words[next] ?? 0) << 32n);
    return Number((both >> BigInt(bit)) & BigInt(2 ** codeBits - 1));
  });
}

/** Centroids of one kv head. */
export interface OracleBooks {
  readonly headDim: number;
  readonly groups: number;
  readonly books: number;
  readonly count: number;
  /** `[book][centroid][subDim]` */
  readonly centroids: Float64Array;
  /** `[dim]` */
  readonly scale: Float64Array;
}

/** Those of a kv head of `centroids`, f16 `[kvHead][book][centroid][subDim]`, and of `scale` `[kvHead][dim]`. */
export function booksOf(
  sizes: Pick<OracleBooks, 'headDim' | 'groups' | 'books' | 'count'>,
  centroids: Uint16Array,
  scale: Float32Array,
  kvHead: number,
): OracleBooks {
  const { headDim, groups, books, count } = sizes;
  const all = (books * count * headDim) / groups;
  return {
    ...sizes,
    centroids: decode('f16', centroids.subarray(kvHead * all, (kvHead + 1) * all)),
    scale: Float64Array.from(scale.subarray(kvHead * headDim, (kvHead + 1) * headDim)),
  };
}

/** The nearest centroid of each sub-vector of rows `[token][dim]`, with distances in f32; -1 where none is near. */
export function nearestCodes(rows: Float64Array, { headDim, groups, books, count, centroids, scale }: OracleBooks): Int16Array {
  const subDim = headDim / groups;
  return Int16Array.from({ length: rows.length / subDim }, (_, index) => {
    const group = index % groups;
    const book = books === 1 ? 0 : group;
    let [best, code] = [Infinity, -1];
    for (let c = 0; c < count; c++) {
      let distance = 0;
      for (let i = 0; i < subDim; i++) {
        const x = Math.fround((rows[index * subDim + i] ?? NaN) / (scale[group * subDim + i] ?? NaN));
        const away = Math.fround(x - (centroids[(book * count + c) * subDim + i] ?? NaN));
        distance = Math.fround(distance + Math.fround(away * away));
      }
      if (distance < best) [best, code] = [distance, c];
    }
    return code;
  });
}

/** What codes stand for, `[token][dim]`: f32 products. */
export function decodedKeys(codes: ArrayLike<number>, { headDim, groups, books, count, centroids, scale }: OracleBooks): Float64Array {
  const subDim = headDim / groups;
  return Float64Array.from({ length: codes.length * subDim }, (_, index) => {
    const [at, dim] = [Math.floor(index / subDim), index % headDim];
    const book = books === 1 ? 0 : at % groups;
    const code = Math.min(codes[at] ?? NaN, count - 1);
    return Math.fround((centroids[(book * count + code) * subDim + (dim % subDim)] ?? NaN) * (scale[dim] ?? NaN));
  });
}
