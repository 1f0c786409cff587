/** What Algorithm 2 and section 3.3 read: s by lag, v by key, h by row of the prompt's last rows. */
export interface Skeleton {
  readonly slash: ArrayLike<number>;
  readonly vertical: ArrayLike<number>;
  readonly horizontal: ArrayLike<number>;
}

export interface BlockOptions {
  readonly sinkTokens: number;
  readonly diagonalTokens: number;
  /** Rows of a query tile: a multiple of 64. */
  readonly tileRows: number;
  readonly slashBound: 'safe' | 'paper';
  /** The last rows that take every block. */
  readonly denseRows: number;
}

/** Keys of a block, and rows of the paper's tile: B of section 3.3. */
export const blockTokens = 64;

const most = (values: ArrayLike<number>, first: number, end: number): number => {
  let largest = -Infinity;
  for (let index = Math.max(0, first); index < Math.min(end, values.length); index++) {
    const value = values[index] ?? NaN;
    // Nothing is known of what is NaN, so it counts as the most.
    largest = Math.max(largest, Number.isNaN(value) ? Infinity : value);
  }
  return largest;
};

/** The largest s + v + h of 64 rows from `firstRow` on and a block: a bound, or the paper's mean of two maxima. */
function pairScore({ slash, vertical, horizontal }: Skeleton, firstRow: number, block: number, bound: string): number {
  const position = slash.length - horizontal.length + firstRow;
  const lag = position - block * blockTokens;
  const [near, far] = [most(slash, lag - blockTokens, lag), most(slash, lag, lag + blockTokens)];
  const ofSlash = bound === 'safe' || near === -Infinity ? Math.max(near, far) : (near + far) / 2;
  const ofKeys = most(vertical, block * blockTokens, (block + 1) * blockTokens);
  const score = ofSlash + ofKeys + most(horizontal, firstRow, firstRow + blockTokens);
  return Number.isNaN(score) ? Infinity : score;
}

/** Of the last `rows` of so many tokens: `[tile][block]`, of the blocks that a tile sees. */
export function blocksSeen<T>(
  { tokens, rows }: { readonly tokens: number; readonly rows: number },
  tileRows: number,
  of: (tile: { readonly index: number; readonly first: number; readonly end: number }, block: number) => T,
): T[][] {
  return Array.from({ length: Math.ceil(rows / tileRows) }, (_, index) => {
    const tile = { index, first: index * tileRows, end: Math.min(rows, (index + 1) * tileRows) };
    return Array.from({ length: Math.ceil((tokens - rows + tile.end) / blockTokens) }, (_, block) => of(tile, block));
  });
}

/** Scores of the same shape: infinite where the tile takes the block whatever the threshold. */
export function withBlocksAlwaysTaken(
  scores: readonly (readonly number[])[],
  shape: { readonly tokens: number; readonly rows: number },
  { sinkTokens, diagonalTokens, tileRows, denseRows }: BlockOptions,
): number[][] {
  return blocksSeen(shape, tileRows, ({ index, first, end }, block) => {
    const sink = block * blockTokens < sinkTokens;
    const diagonal = (block + 1) * blockTokens > shape.tokens - shape.rows + first - diagonalTokens + 1;
    const score = scores[index]?.[block] ?? NaN;
    return sink || diagonal || end > shape.rows - denseRows || Number.isNaN(score) ? Infinity : score;
  });
}

/** `[tile][block]`, of the blocks that a tile sees: infinite where it takes the block whatever the threshold. */
export function blockScores(skeleton: Skeleton, options: BlockOptions): number[][] {
  const shape = { tokens: skeleton.slash.length, rows: skeleton.horizontal.length };
  const scores = blocksSeen(shape, options.tileRows, ({ first, end }, block) => {
    const halves = Array.from({ length: Math.ceil((end - first) / blockTokens) }, (_, half) => first + half * blockTokens);
    return Math.max(...halves.map((row) => pairScore(skeleton, row, block, options.slashBound)));
  });
  return withBlocksAlwaysTaken(scores, shape, options);
}

/** The quadratic builder: ascending lists of blocks that are not below the threshold. */
export function listsAbove(scores: readonly (readonly number[])[], threshold: number): number[][] {
  return scores.map((tile) => tile.flatMap((score, block) => (score < threshold ? [] : [block])));
}

/** τ_B of a share of the softmax's mass that may be lost. */
export function thresholdOfEpsilon(epsilon: number, tokens: number): number {
  return Math.log((epsilon * blockTokens) / tokens);
}

/**
 * `[head][tile]`: the best blocks of all heads, so large a share of them; of equal ones the first. What is infinite is
 * always among them.
 */
export function listsOfBudget(scores: readonly (readonly (readonly number[])[])[], budget: number): number[][][] {
  return bestBlocks(scores, Math.ceil(budget * scores.flat(2).length));
}

/** The same of a budget of so many blocks a tile, of all heads together; tiles of dense rows have theirs besides. */
export function listsOfTileBlocks(
  scores: readonly (readonly (readonly number[])[])[],
  tileBlocks: number,
  { tileRows, denseRows, rows }: Pick<BlockOptions, 'tileRows' | 'denseRows'> & { readonly rows: number },
): number[][][] {
  const ofTiles = (scores[0] ?? []).map(({ length }, tile) => {
    const isDense = Math.min(rows, (tile + 1) * tileRows) > rows - denseRows;
    return Math.min(scores.length * length, isDense ? Infinity : tileBlocks);
  });
  return bestBlocks(scores, ofTiles.reduce((sum, blocks) => sum + blocks, 0));
}

function bestBlocks(scores: readonly (readonly (readonly number[])[])[], atLeast: number): number[][][] {
  const blocks = scores.flatMap((tiles, head) =>
    tiles.flatMap((of, tile) => of.map((score, block) => ({ head, tile, block, score }))),
  );
  const wanted = Math.max(atLeast, blocks.filter(({ score }) => score === Infinity).length);
  const lists = scores.map((tiles) => tiles.map((): number[] => []));
  // The sort is stable.
  const best = blocks.sort((a, b) => (a.score === b.score ? 0 : b.score - a.score)).slice(0, wanted);
  for (const { head, tile, block } of best) lists[head]?.[tile]?.push(block);
  return lists.map((tiles) => tiles.map((list) => list.sort((a, b) => a - b)));
}

/**
 * `[tile]`: the best blocks, as few as hold this share of the mass e^score of those that are known, together with those
 * that are infinite in `scores`; of equal ones the first. `known` has all scores.
 */
export function listsOfMass(
  scores: readonly (readonly number[])[],
  known: readonly (readonly number[])[],
  share: number,
): number[][] {
  return scores.map((tile, index) => {
    const masses = (known[index] ?? []).map((score) => (Number.isNaN(score) ? 0 : Math.exp(score)));
    const massOf = (block: number) => masses[block] ?? NaN;
    const best = tile.map((_, block) => block).sort((a, b) => {
      const [of, other] = [tile[a] ?? NaN, tile[b] ?? NaN];
      return of === other ? 0 : other - of;
    });
    const wanted = share * masses.reduce((sum, mass) => sum + mass, 0);
    let mass = 0;
    const list = best.filter((block) => {
      const takes = tile[block] === Infinity || mass < wanted;
      if (takes) mass += massOf(block);
      return takes;
    });
    return list.sort((a, b) => a - b);
  });
}

/** `[tile]`: blocks whose mass is at least so many times the largest one's, in the arithmetic of f32. */
export function listsOfMax(scores: readonly (readonly number[])[], known: readonly (readonly number[])[], factor: number): number[][] {
  return scores.flatMap((tile, index) => {
    const best = Math.max(...(known[index] ?? []).filter((score) => !Number.isNaN(score)));
    return listsAbove([tile], Math.fround(best + Math.fround(Math.log(factor))));
  });
}

/** Mean and deviation of s + v + h over all causal elements (Eq. 12 and 13), in O(N): the cross terms are running sums. */
export function skeletonMoments({ slash, vertical, horizontal }: Skeleton): { mean: number; deviation: number } {
  const tokens = slash.length;
  const at = (values: ArrayLike<number>, index: number) => values[index] ?? NaN;
  let [sum, squares, slashSum, verticalSum] = [0, 0, 0, 0];
  for (let index = 0; index < tokens; index++) {
    // Of row `index`: its own h, and the lags and keys up to it.
    slashSum += at(slash, index);
    verticalSum += at(vertical, index);
    const h = at(horizontal, index);
    const rest = tokens - index;
    sum += rest * (at(slash, index) + at(vertical, index)) + (index + 1) * h;
    squares += rest * (at(slash, index) ** 2 + at(vertical, index) ** 2) + (index + 1) * h * h;
    squares += 2 * h * (slashSum + verticalSum);
  }
  // Key j meets the lags below N - j.
  let lagSum = 0;
  for (let lag = 0; lag < tokens; lag++) {
    lagSum += at(slash, lag);
    squares += 2 * lagSum * at(vertical, tokens - 1 - lag);
  }
  const count = (tokens * (tokens + 1)) / 2;
  return { mean: sum / count, deviation: Math.sqrt(squares / count - (sum / count) ** 2) };
}

/**
 * Eq. 14: τ_B for a share of blocks, if a block's score were the largest of 64 independent normal elements. It is not: it is
 * the sum of three maxima.
 */
export function thresholdOfMoments(skeleton: Skeleton, budget: number): number {
  const { mean, deviation } = skeletonMoments(skeleton);
  return mean + deviation * normalQuantile((1 - budget) ** (1 / blockTokens));
}

/** Φ⁻¹, by bisection of Φ(x) = 1/2 + φ(x) (x + x³/3 + x⁵/(3·5) + …). */
function normalQuantile(probability: number): number {
  const below = (x: number): number => {
    let [sum, term] = [x, x];
    for (let odd = 3; odd < 200; odd += 2) sum += term *= (x * x) / odd;
    return 0.5 + (sum * Math.exp((-x * x) / 2)) / Math.sqrt(2 * Math.PI);
  };
  let [low, high] = [-6, 6];
  for (let step = 0; step < 60; step++) {
    const middle = (low + high) / 2;
    if (below(middle) < probability) low = middle;
    else high = middle;
  }
  return low;
}

/**
 * Algorithm 2: columns, then diagonals, then rows, the largest first, each until none can have an element that is above
 * the threshold. As printed it stops earlier, and leaves elements out.
 * @returns the elements `row * N + key`
 */
export function elementsAbove({ slash, vertical, horizontal }: Skeleton, threshold: number): Set<number> {
  const tokens = slash.length;
  const found = new Set<number>();
  const at = (values: ArrayLike<number>, index: number) => values[index] ?? NaN;
  const [topSlash, topVertical, topHorizontal] = [slash, vertical, horizontal].map((values) => most(values, 0, tokens)) as [
    number,
    number,
    number,
  ];
  const add = (row: number, key: number) => {
    const score = at(slash, row - key) + at(vertical, key) + at(horizontal, row);
    if (!(score < threshold)) found.add(row * tokens + key);
  };
  const descending = (values: ArrayLike<number>) =>
    Array.from({ length: tokens }, (_, index) => index).sort((a, b) => at(values, b) - at(values, a));
  for (const key of descending(vertical)) {
    if (at(vertical, key) + topSlash + topHorizontal < threshold) break;
    for (let row = key; row < tokens; row++) add(row, key);
  }
  for (const lag of descending(slash)) {
    if (at(slash, lag) + topVertical + topHorizontal < threshold) break;
    for (let key = 0; key + lag < tokens; key++) add(key + lag, key);
  }
  for (const row of descending(horizontal)) {
    if (at(horizontal, row) + topSlash + topVertical < threshold) break;
    for (let key = 0; key <= row; key++) add(row, key);
  }
  return found;
}
