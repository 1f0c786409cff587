import type { Device } from '../handles.js';

/** A batch whose first entry is the sequence of the last slot: a kernel that takes the one number for the other shows. */
export class DescendingSlots {
  /** `[batch]` */
  readonly slots: Int32Array;
  /** `[batch + 1]`, in rows */
  readonly queryStart: Int32Array;
  /** `[slot, kvHead]`, in tokens */
  readonly keyCounts: Int32Array;

  /** Of the rows of each entry, and the keys of each entry and kv head. */
  constructor(
    rows: readonly number[],
    keyCounts: readonly (readonly number[])[],
    private readonly kvHeads: number,
  ) {
    this.slots = Int32Array.from(rows, (_, entry) => rows.length - 1 - entry);
    this.queryStart = Int32Array.from([0, ...rows], (_, entry) => rows.slice(0, entry).reduce((sum, count) => sum + count, 0));
    this.keyCounts = new Int32Array(rows.length * kvHeads);
    keyCounts.forEach((heads, entry) => {
      this.keyCounts.set(heads, this.tableRow(entry, 0));
    });
  }

  /** Which row of a table `[slot, kvHead, …]` is of one kv head of an entry. */
  tableRow(entry: number, kvHead: number): number {
    return (this.slots[entry] ?? NaN) * this.kvHeads + kvHead;
  }

  place(device: Device) {
    const batch = this.slots.length;
    return {
      keyCounts: device.tensor('i32', ['slot', 'kvHead'], [batch, this.kvHeads], this.keyCounts),
      slots: device.tensor('i32', ['batch'], [batch], this.slots),
      queryStart: device.tensor('i32', ['boundary'], [batch + 1], this.queryStart),
    };
  }
}
