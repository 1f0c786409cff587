import { SlotBlocks } from '@kv/sparse-core/native';

/** The quantized blocks of a slot, oldest first, and what is to become of its dense ones. */
export class SlotCodes extends SlotBlocks {
  /** Whether its prompt is complete: blocks that leave the window are quantized from then on. */
  finished = false;
  /** Blocks that its dense tokens were promised, of all kv heads. */
  promised = 0;
}
