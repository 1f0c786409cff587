// How many operations attention and the estimates of the presets take: an addition, a multiplication, a division, a root, a
// cosine, an exponential and a logarithm are one each. Counted as the CPU kernels loop, without the lanes that pad a vector;
// maxima, comparisons and copies are not counted. A step is the last rows of a prompt in one layer:
// `{ queryHeads, kvHeads, headDim, pairs, rows, tokens }`, with as many pairs as the rotation has frequencies.

const [blockTokens, tileRows] = [64, 128];
/** Of decompose-attention: rows that share moments, rows of a task, samples of a task. */
const [momentRows, runRows, sampleRun] = [64, 512, 64];
/** Of clustered-block-scores: clusters of a block, and how many of a tile's rows are one that is scored. */
const [clusters, scoredRowStep] = [8, 2];
/** Of vertical-slash-block-scores. */
const probedRows = 64;

const sumOver = (count, of) => {
  let sum = 0;
  for (let index = 0; index < count; index++) sum += of(index);
  return sum;
};

/** How many blocks the tiles of a step see, of one head. */
export function blocksSeen({ rows, tokens }) {
  const end = (tile) => tokens - rows + Math.min(rows, (tile + 1) * tileRows);
  return sumOver(Math.ceil(rows / tileRows), (tile) => Math.ceil(end(tile) / blockTokens));
}

/** Attention over so many blocks of a tile: products with keys and with values. */
export function attentionFlops({ headDim }, blocks) {
  return blocks * tileRows * blockTokens * 4 * headDim;
}

/** decomposeAttention of all rows of a prompt at once (Algorithm 1), and the sums of its three parts for each pair of blocks. */
export function skeletonFlops(step, { samples = 80 * step.headDim, sinkTokens = 1, diagonalTokens = 100 } = {}) {
  const { queryHeads, kvHeads, headDim: d, pairs, rows, tokens } = step;
  const interiorEnd = (row) => Math.max(sinkTokens, row + 1 - diagonalTokens);
  const interiorKeys = interiorEnd(tokens - 1) - sinkTokens;
  const coefficients = 2 * pairs + d;
  const firstRow = tokens - rows;

  // Line 1, and cosines, sines and their means of lines 9 and 11, which all heads share.
  const shared = samples * pairs * (4 + 10);
  // Line 2; sums of keys before and after rotation; their moments twice, for runs of rows and within them.
  const ofKeys = tokens * (14 * pairs + d) + interiorKeys * (2 * 2 * d * d + 3 * d);
  // Means of keys behind the samples: each run of samples goes on from the sums of its run of rows.
  const elements = (interiorKeys * (interiorKeys + 1)) / 2;
  const rowOfSample = (sample) => sinkTokens + diagonalTokens + Math.floor((Math.sqrt(8 * ((sample * elements) / samples) + 1) - 1) / 2);
  const keysOfSamples = sumOver(Math.ceil(samples / sampleRun), (run) => {
    const [first, last] = [run * sampleRun, Math.min(samples, (run + 1) * sampleRun) - 1].map(rowOfSample);
    return interiorEnd(last) - interiorEnd(firstRow + Math.floor((first - firstRow) / runRows) * runRows);
  });
  // Lines 10 and 11, AᵀA with its lower half only, and Cholesky.
  const ofSamples = keysOfSamples * d + samples * 2 * d + samples * coefficients * (coefficients + 1) + coefficients ** 3 / 3;
  // Lines 3 to 8: the moments, and the exact products of sinks and of the band that the rows of a tile have in common.
  const exactKeys = sumOver(Math.ceil(rows / momentRows), (tile) => {
    const first = firstRow + tile * momentRows;
    const count = Math.min(momentRows, tokens - first);
    return count * (Math.min(sinkTokens, tokens) + first + count - interiorEnd(first));
  });
  const ofRows = rows * (2 * d * d + 4 * d + 10) + exactKeys * (2 * d + 6);
  // Lines 12 to 19: b and Aᵀb, two triangles, slash, vertical, the last row, running sums, horizontal.
  const ofParts = samples * (2 * d + 1 + 2 * coefficients) + 2 * coefficients ** 2 + tokens * (4 * pairs + 4 * d + 3 + 2) + rows * 12;
  const pairsOfBlocks = sumOver(Math.ceil(rows / blockTokens), (tile) => {
    return Math.ceil((firstRow + Math.min(rows, (tile + 1) * blockTokens)) / blockTokens);
  });
  return shared + kvHeads * (ofKeys + ofSamples) + queryHeads * (ofRows + ofParts + 2 * pairsOfBlocks);
}

export function clusteredFlops(step) {
  const { queryHeads, kvHeads, headDim: d, tokens } = step;
  const blocks = Math.ceil(tokens / blockTokens);
  // The mean, distances from it and from each seed, and the means of the clusters.
  const ofBlock = blockTokens * d + (clusters + 1) * blockTokens * 3 * d + blockTokens * d + (clusters + 1) * d + clusters;
  // Products and counts of keys of each cluster; the denominator; the mean share.
  const ofRow = clusters * (2 * d + 1) + 3 + 4;
  return kvHeads * blocks * ofBlock + (queryHeads * blocksSeen(step) * tileRows * ofRow) / scoredRowStep;
}

export function pooledFlops(step) {
  const { queryHeads, kvHeads, headDim: d, tokens } = step;
  return kvHeads * tokens * d + queryHeads * blocksSeen(step) * (tileRows * (2 * d + 3) + 4);
}

export function antidiagonalFlops(step, stride = 8) {
  const { queryHeads, headDim: d } = step;
  const stridedPairs = (tileRows / stride) * (blockTokens / stride);
  // Products of strided rows, exponentials; then each row's share of a block.
  return queryHeads * blocksSeen(step) * (stridedPairs * (2 * stride * d + 3) + (tileRows / stride) * 8);
}

export function verticalSlashFlops(step) {
  const { queryHeads, headDim: d, tokens } = step;
  // The products twice: for the denominators, and for the weights that lines add up.
  return queryHeads * (tokens * probedRows * (2 * 2 * d + 6 + 5) + blocksSeen(step) * 4);
}
