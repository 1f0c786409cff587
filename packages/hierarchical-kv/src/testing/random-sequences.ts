import type { Device, Tensor } from '@kv/sparse-core';
import type { Random } from '@kv/sparse-core/testing';

/** Sequences in blocks, as tables say which: `slots[b]` has a row in the batch, or `rows[b]` of them. */
export interface RandomSequences {
  readonly blockTokens: number;
  readonly kvHeads: number;
  readonly width: number;
  readonly slotCount: number;
  /** `[slot, kvHead, width]`, numbers of blocks, each once. */
  readonly table: Int32Array;
  /** `[slot, kvHead]` */
  readonly counts: Int32Array;
  readonly slots: Int32Array;
  readonly rows: readonly number[];
  readonly queryStart: Int32Array;
}

export function randomSequences(
  random: Random,
  sizes: { readonly kvHeads: number; readonly blockTokens: number; readonly width: number; readonly slotCount: number; readonly mostRows?: number },
): RandomSequences {
  const { kvHeads, blockTokens, width, slotCount, mostRows = 1 } = sizes;
  const slots = random.permutation(slotCount).slice(0, random.integer(1, slotCount));
  const rows = Array.from(slots, () => random.integer(0, mostRows));
  const queryStart = new Int32Array(slots.length + 1);
  rows.forEach((count, entry) => (queryStart[entry + 1] = (queryStart[entry] ?? 0) + count));
  const counts = Int32Array.from({ length: slotCount * kvHeads }, () => random.integer(1, width * blockTokens));
  return { ...{ blockTokens, kvHeads, width, slotCount, counts, slots, rows, queryStart }, table: random.permutation(slotCount * kvHeads * width) };
}

/** The same on a device. */
export function placeSequences(device: Device, { kvHeads, width, slotCount, table, counts, slots, queryStart }: RandomSequences) {
  return {
    blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [slotCount, kvHeads, width], table),
    keyCounts: device.tensor('i32', ['slot', 'kvHead'], [slotCount, kvHeads], counts),
    slots: device.tensor('i32', ['batch'], [slots.length], slots),
    queryStart: device.tensor('i32', ['boundary'], [slots.length + 1], queryStart),
  };
}

/** What is wrong with a batch, the tensor that says it, and the number that all of it becomes. */
export const spoiltSequences = [
  ['counts more than its table holds', 'keyCounts', 2 ** 20],
  ['counts fewer than none', 'keyCounts', -64],
  ['names a block that there is not', 'blockTable', 2 ** 20],
  ['names a block below zero', 'blockTable', -1],
  ['names a slot that there is not', 'slots', 99],
  ['has rows that descend', 'queryStart', 99],
] as const;

/** A tensor of the same kind, of which every element is this number. */
export function filledWith<T extends Tensor<'i32'>>(tensor: T, number: number): T {
  return tensor.device.tensor('i32', tensor.axes, tensor.shape, new Int32Array(tensor.byteLength / 4).fill(number)) as T;
}
