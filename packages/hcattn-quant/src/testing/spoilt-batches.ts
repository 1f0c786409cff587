import type { Stream, Tensor } from '@kv/sparse-core';

/** What is wrong with a batch over cached blocks, the tensor that says it, and the number that all of it becomes. */
export const spoiltBatches = [
  ['counts part of a block', 'keyCounts', 100],
  ['counts more than its table holds', 'keyCounts', 64 * 1000],
  ['counts fewer than none', 'keyCounts', -64],
  ['names a block that there is not', 'blockTable', 1 << 20],
  ['names a block below zero', 'blockTable', -1],
  ['names a slot that there is not', 'slots', 2],
  ['has rows that descend', 'queryStart', 99],
] as const;

/** What is wrong with lists of rows of values, the tensor that says it, and the number that its first becomes. */
export const spoiltLists = [
  ['a list that is longer than there is room for', 'counts', 71],
  ['a list of fewer than none', 'counts', -1],
  ['a row behind the pool', 'valueRows', 192],
  ['a row before the pool', 'valueRows', -1],
] as const;

/** Makes every element of a tensor this number; done when it returns. */
export async function spoil(stream: Stream, tensor: Tensor<'i32'>, number: number): Promise<void> {
  stream.write(tensor, (await tensor.read()).fill(number));
  await stream.synchronize();
}
