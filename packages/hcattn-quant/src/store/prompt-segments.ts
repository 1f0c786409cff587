import { CapabilityError, type RowBatchEntry } from '@kv/sparse-core';
import { blockTokens } from '../quantized-blocks.js';

/** Which blocks of 64 of a slot rows see: those before `firstEnd`, of the first block of the text, and those from `own` on. */
export interface SeenBlocks {
  readonly firstEnd: number;
  readonly own: number;
}

const allBlocks: SeenBlocks = { firstEnd: 0, own: 0 };

/** Rows of a prompt that see the same of what their slot holds. */
export interface PromptSegment {
  readonly slot: number;
  /** Of its entry in the batch. */
  readonly entry: number;
  readonly rows: number;
  /** The newest tokens of the slot, which come behind these rows. */
  readonly hidden: number;
  readonly seen: SeenBlocks;
}

/** What a slot holds. */
export interface PromptSlot {
  /** Tokens of each kv head, the batch's rows included. */
  readonly lengths: readonly number[];
  /** Tokens of a block of its prompt; undefined where rows see all. */
  readonly blockTokens: number | undefined;
}

/** The rows of a batch, in their order, cut where they see something else. */
export function segmentsOf(entries: readonly RowBatchEntry[], slotOf: (slot: number) => PromptSlot): PromptSegment[] {
  return entries.flatMap(({ slot, rows }, entry) => {
    const held = slotOf(slot);
    const { blockTokens: size } = held;
    if (size === undefined) return [{ slot, entry, rows, hidden: 0, seen: allBlocks }];
    const length = lengthOf(held.lengths);
    const segments: PromptSegment[] = [];
    for (let first = length - rows; first < length; ) {
      const block = Math.floor(first / size);
      const end = Math.min((block + 1) * size, length);
      segments.push({ slot, entry, rows: end - first, hidden: length - end, seen: seenIn(block, size) });
      first = end;
    }
    return segments;
  });
}

/** What the rows of a block of the text see. */
export function seenIn(block: number, size: number | undefined): SeenBlocks {
  if (size === undefined) return allBlocks;
  return { firstEnd: size / blockTokens, own: (block * size) / blockTokens };
}

export function sees({ firstEnd, own }: SeenBlocks, block: number): boolean {
  return block < firstEnd || block >= own;
}

export function seesAll({ firstEnd, own }: SeenBlocks): boolean {
  return own <= firstEnd;
}

/** Share of the causal scores of rows that they see: the last of `length` tokens, in blocks of `size`. */
export function scoresSeen(length: number, rows: number, size: number | undefined): { readonly seen: number; readonly all: number } {
  let [seen, all] = [0, 0];
  for (let position = length - rows; position < length; position++) {
    const before = size === undefined ? 0 : Math.max(0, Math.floor(position / size) - 1) * size;
    seen += position + 1 - before;
    all += position + 1;
  }
  return { seen, all };
}

/** The tokens of each kv head, where they are as many. */
function lengthOf(lengths: readonly number[]): number {
  const [length = 0] = lengths;
  if (lengths.every((each) => each === length)) return length;
  throw new CapabilityError(
    `A prompt is read in blocks where all kv heads hold as many tokens; these hold ${lengths.join(', ')}. ` +
      'Read it with hcAttentionPrefill() without blockTokens.',
    { subject: 'blockTokens', given: lengths, wanted: 'kv heads of one length' },
  );
}
