// Attention maps of one head that are a slash, a vertical and a horizontal part, and the blocks that Sparse Skeleton
// takes of them. Nothing quadratic is kept.
import { selectKeyBlocks } from '../../packages/skeleton-prefill/dist/index.js';

export const [blockTokens, tileRows] = [64, 128];

/** Nearer keys count more, and a few columns for all rows. */
function syntheticParts(count) {
  let seed = 1;
  const random = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
  const normal = () => Math.sqrt(-2 * Math.log(random())) * Math.cos(2 * Math.PI * random());
  const slash = Float32Array.from({ length: count }, (_, lag) => -1.5 * Math.log1p(lag / 16) + 0.5 * Math.cos(lag / 97));
  const vertical = Float32Array.from({ length: count }, () => normal() + (random() < 0.001 ? 6 : 0));
  // The logarithm of what a row adds up to, of some rows, and in between on a line.
  const step = Math.max(1, Math.floor(count / 512));
  const sums = new Map();
  const sumOf = (at) => {
    if (!sums.has(at)) {
      let sum = 0;
      for (let key = 0; key <= at; key++) sum += Math.exp(slash[at - key] + vertical[key]);
      sums.set(at, Math.log(sum));
    }
    return sums.get(at);
  };
  const horizontal = Float32Array.from({ length: count }, (_, at) => {
    const before = at - (at % step);
    const after = Math.min(before + step, count - 1);
    return -(sumOf(before) + ((sumOf(after) - sumOf(before)) * (at - before)) / step);
  });
  return { slash, vertical, horizontal };
}

/** How many blocks the tiles of a map of so many tokens take for an epsilon, and how many they see. */
export async function blocksOfSyntheticMap(device, count, epsilon) {
  const parts = syntheticParts(count);
  let [taken, seen] = [0, 0];
  const stepRows = 65536;
  for (let end = Math.min(stepRows, count); ; end = Math.min(end + stepRows, count)) {
    const first = Math.floor((end - 1) / stepRows) * stepRows;
    const [stream, rowsOfStep] = [device.defaultStream, end - first];
    const tiles = Math.ceil(rowsOfStep / tileRows);
    const upTo = (axis, numbers, from = 0) => device.tensor('f32', ['queryHead', axis], [1, end - from], numbers.slice(from, end));
    const slash = upTo('lag', parts.slash);
    const vertical = upTo('key', parts.vertical);
    const horizontal = upTo('row', parts.horizontal, first);
    const keyBlocks = device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], [1, tiles, Math.ceil(end / blockTokens)]);
    const keyBlockCounts = device.tensor('i32', ['queryHead', 'queryTile'], [1, tiles]);
    const threshold = { epsilon: (epsilon * end) / count };
    selectKeyBlocks(stream, { slash, vertical, horizontal, threshold, keyBlocks, keyBlockCounts, diagonalTokens: 100 });
    for (const [tile, listed] of (await keyBlockCounts.read(stream)).entries()) {
      taken += listed;
      seen += Math.ceil((first + Math.min((tile + 1) * tileRows, rowsOfStep)) / blockTokens);
    }
    for (const tensor of [slash, vertical, horizontal, keyBlocks, keyBlockCounts]) tensor.dispose();
    if (end === count) return { taken, seen };
  }
}
