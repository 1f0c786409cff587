import { Capability } from './capability.js';

/** How a store holds blocks in two memories, for a scheduler. Of one layer; all layers have as many. */
export interface KvResidency {
  /** Consecutive tokens of one kv head in a block. */
  readonly blockTokens: number;
  /** Blocks of the cache on the device, beside those that are always there. */
  readonly deviceBlocks: number;
  /** Tokens that a kv head reads in a step, those of sinks and window included. */
  readonly budgetTokens: number;
  readonly sinkTokens: number;
  readonly localWindow: number;
}

/** What stores have whose steps read some of the blocks that are in host memory: `demand`, `evict` and `setBudget` too. */
export const kvResidency = new Capability<KvResidency>('kv: blocks in two memories', 'hierarchicalStore()');
