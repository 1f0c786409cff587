import { dot, logSumExp, minus } from './vectors.js';

/** The last rows of a sequence, of one query head, over the keys of its kv head. */
export interface ScoredHead {
  /** `[row][dim]`: of the last tokens. */
  readonly queries: readonly Float64Array[];
  /** `[token][dim]` */
  readonly keys: readonly Float64Array[];
  readonly scale: number;
}

/** `[tile][block]`, of all blocks. */
export type BlockScores = number[][];

export const tileRows = 128;
export const blockKeys = 64;

const numbersTo = (count: number) => Array.from({ length: count }, (_, index) => index);
const positionOf = ({ queries, keys }: ScoredHead, row: number) => keys.length - queries.length + row;

/** Calls `score` for every tile and block; the tile as the numbers of its rows, the block as those of its keys. */
function forEachBlock(head: ScoredHead, score: (rows: readonly number[], keys: readonly number[]) => number): BlockScores {
  const [rows, tokens] = [head.queries.length, head.keys.length];
  const part = (first: number, size: number, end: number) => numbersTo(Math.min(size, end - first)).map((index) => first + index);
  return numbersTo(Math.ceil(rows / tileRows)).map((tile) => {
    return numbersTo(Math.ceil(tokens / blockKeys)).map((block) => {
      return score(part(tile * tileRows, tileRows, rows), part(block * blockKeys, blockKeys, tokens));
    });
  });
}

/** Less the logarithm of each tile's sum. */
function normalised(scores: BlockScores): BlockScores {
  return scores.map((tile) => {
    const total = logSumExp(tile);
    return tile.map((score) => score - total);
  });
}

/** The true logarithm of the share of each tile's attention that falls on each block. */
export function exactBlockScores(head: ScoredHead): BlockScores {
  const { queries, keys, scale } = head;
  const weights = queries.map((query, row) => {
    const logits = keys.slice(0, positionOf(head, row) + 1).map((key) => scale * dot(query, key));
    const denominator = logSumExp(logits);
    return logits.map((logit) => logit - denominator);
  });
  return forEachBlock(head, (rows, of) => {
    return logSumExp(rows.flatMap((row) => of.map((key) => weights[row]?.[key] ?? -Infinity))) - Math.log(rows.length);
  });
}

/** The `count` blocks of each tile with the most attention, ascending: what no estimate can better. */
export function topBlocks(scores: BlockScores, count: number): number[][] {
  return scores.map((tile) => {
    const descending = numbersTo(tile.length).sort((a, b) => (tile[b] ?? NaN) - (tile[a] ?? NaN) || a - b);
    return descending.slice(0, count).sort((a, b) => a - b);
  });
}

/** FlashPrefill: every query of the tile over the mean key of each block that begins no later. */
export function pooledByDefinition(head: ScoredHead): BlockScores {
  const { queries, keys, scale } = head;
  const logarithms = forEachBlock(head, (rows, of) => {
    const mean = meanOf(of.map((key) => keys[key] ?? new Float64Array()));
    const seeing = rows.filter((row) => positionOf(head, row) >= (of[0] ?? NaN));
    return logSumExp(seeing.map((row) => scale * dot(queries[row] ?? [], mean)));
  });
  return normalised(logarithms);
}

/** XAttention: sums along antidiagonals of `stride` rows and keys, and a softmax over each strided row. */
export function antidiagonalByDefinition(head: ScoredHead, stride: number): BlockScores {
  const { queries, keys, scale } = head;
  const shares = numbersTo(Math.ceil(queries.length / stride)).map((row) => {
    const seen = Math.floor(positionOf(head, row * stride) / stride) + 1;
    const logits = numbersTo(seen).map((key) => {
      const products = numbersTo(stride).map((i) => {
        const [query, other] = [queries[row * stride + stride - 1 - i], keys[key * stride + i]];
        // Rows and keys beyond the last are zeros.
        return query === undefined || other === undefined ? 0 : dot(query, other);
      });
      return (scale / stride) * products.reduce((sum, product) => sum + product, 0);
    });
    const denominator = logSumExp(logits);
    return logits.map((logit) => logit - denominator);
  });
  const strided = (numbers: readonly number[]) => numbers.filter((number) => number % stride === 0).map((number) => number / stride);
  return forEachBlock(head, (rows, of) => {
    const all = strided(rows);
    return logSumExp(all.flatMap((row) => strided(of).map((key) => shares[row]?.[key] ?? -Infinity))) - Math.log(all.length);
  });
}

/** MInference: the largest vertical or slash line of the exact attention of the last 64 rows that crosses the block. */
export function verticalSlashByDefinition(head: ScoredHead): BlockScores {
  const { queries, keys, scale } = head;
  const probed = numbersTo(queries.length).slice(-64);
  const [vertical, slash] = [new Float64Array(keys.length), new Float64Array(keys.length)];
  for (const row of probed) {
    const position = positionOf(head, row);
    const logits = keys.slice(0, position + 1).map((key) => scale * dot(queries[row] ?? [], key));
    const denominator = logSumExp(logits);
    logits.forEach((logit, key) => {
      const share = Math.exp(logit - denominator) / probed.length;
      vertical[key] = (vertical[key] ?? NaN) + share;
      slash[position - key] = (slash[position - key] ?? NaN) + share;
    });
  }
  return forEachBlock(head, (rows, of) => {
    const first = positionOf(head, rows[0] ?? NaN);
    // A tile counts as one of 128 rows.
    const lags = numbersTo(tileRows + blockKeys - 1).map((place) => first - (of[0] ?? NaN) - blockKeys + 1 + place);
    const seen = positionOf(head, rows.at(-1) ?? NaN) >= (of[0] ?? NaN);
    return seen ? Math.log(Math.max(...of.map((key) => vertical[key] ?? 0), ...lags.map((lag) => slash[lag] ?? 0))) : -Infinity;
  });
}

/** `[cluster]`, each some of the keys: those nearest to seeds that are far from each other. */
function clustersOf(keys: readonly Float64Array[], most: number): Float64Array[][] {
  const distancesFrom = (seed: Float64Array) => keys.map((key) => minus(key, seed)).map((apart) => dot(apart, apart));
  const farthest = (distances: readonly number[]) => keys[distances.indexOf(Math.max(...distances))] ?? new Float64Array();
  const nearest = keys.map(() => ({ cluster: 0, distance: Infinity }));
  let seed = farthest(distancesFrom(meanOf(keys)));
  for (let cluster = 0; cluster < most; cluster++) {
    distancesFrom(seed).forEach((distance, key) => {
      if (distance < (nearest[key]?.distance ?? NaN)) nearest[key] = { cluster, distance };
    });
    seed = farthest(nearest.map(({ distance }) => distance));
  }
  return numbersTo(most).map((cluster) => keys.filter((_, key) => nearest[key]?.cluster === cluster));
}

function meanOf(keys: readonly Float64Array[]): Float64Array {
  return Float64Array.from(keys[0] ?? [], (_, d) => keys.reduce((sum, key) => sum + (key[d] ?? NaN), 0) / keys.length);
}

/** Ours: every second query of a tile over the mean keys of up to 8 clusters of each block that begins no later. */
export function clusteredByDefinition(head: ScoredHead): BlockScores {
  const { queries, keys, scale } = head;
  const blocks = numbersTo(Math.ceil(keys.length / blockKeys)).map((block) => {
    const clusters = clustersOf(keys.slice(block * blockKeys, (block + 1) * blockKeys), 8).filter((of) => of.length > 0);
    return clusters.map((of) => ({ mean: meanOf(of), logarithm: Math.log(of.length) }));
  });
  const shares = queries.map((query, row) => {
    if (row % 2 === 1) return [];
    const logits = blocks.slice(0, Math.floor(positionOf(head, row) / blockKeys) + 1).map((clusters) => {
      return Math.max(...clusters.map(({ mean, logarithm }) => scale * dot(query, mean) + logarithm));
    });
    const denominator = logSumExp(logits);
    return logits.map((logit) => logit - denominator);
  });
  return forEachBlock(head, (rows, [first = NaN]) => {
    const scored = rows.filter((_, index) => index % 2 === 0);
    return logSumExp(scored.map((row) => shares[row]?.[first / blockKeys] ?? -Infinity)) - Math.log(scored.length);
  });
}
