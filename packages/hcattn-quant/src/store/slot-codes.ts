import { SlotBlocks } from '@kv/sparse-core/native';

/** The number of a block that is nowhere among the staged ones. */
export const notStaged = -1;

/** The quantized blocks of a slot, oldest first, and what is to become of its dense ones. */
export class SlotCodes extends SlotBlocks {
  /** Where each block is in host memory as it is: as many, in the same order. */
  readonly staged: SlotBlocks;
  /** Whether its prompt is complete: blocks that leave the window are quantized from then on. */
  finished = false;
  /** Blocks that its dense tokens were promised, of all kv heads. */
  promised = 0;
  /** Rows of a step that get dense blocks when they are appended, and how many of these blocks stay dense behind it. */
  awaited = { rows: 0, blocks: 0 };

  constructor(kvHeads: number, width: number) {
    super(kvHeads, width);
    this.staged = new SlotBlocks(kvHeads, width);
  }

  /** The numbers of staged blocks of a kv head, from `first` on. */
  stagedIds(kvHead: number, first = 0): Int32Array {
    return this.staged.of(kvHead, first).filter((id) => id !== notStaged);
  }

  /** Takes out of the staged blocks of a kv head those in front of `end` that follow each other, back to `first`. */
  unstage(kvHead: number, first: number, end: number): Int32Array {
    const held = this.staged.of(kvHead);
    const last = Math.min(end, held.length);
    let start = last;
    while (start > first && held[start - 1] !== notStaged) start -= 1;
    const taken = held.slice(start, last);
    held.fill(notStaged, start, last);
    return taken;
  }
}
