import type { Stream, TensorHandle } from '@kv/sparse-core';
import { loadAddon, operation } from '@kv/sparse-core/native';
import { type BlockTableHandle, expectBlockTokens, keyCountsRule, tableRule } from './block-batch.js';
import type { BlockCache } from './plan-blocks.js';

export interface ForgetBlocksArguments extends Pick<BlockCache, 'where'> {
  /** i32: the host blocks of each kv head. All slots of the table are meant; that of one is a slice. */
  readonly blockTable: BlockTableHandle;
  /** i32 `[slot, kvHead]`: tokens. */
  readonly keyCounts: TensorHandle<'i32', readonly ['slot', 'kvHead']>;
  /** Tokens of a block. */
  readonly blockTokens: number;
}

/** In the order of `native/bindings/forget-blocks.binding.cc`. */
const rules = [tableRule, keyCountsRule, { name: 'where', dtype: ['i32'], shape: ['hostBlock'], layout: 'contiguous' }] as const;

const enqueue = operation('forgetBlocks', rules, ['where']);

/**
 * Says that the cache of `planBlocks` has none of the blocks of these sequences, by what their tables say when the stream comes
 * here. Where they are pinned does not change.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError for a wrong `blockTokens`; tables that lead outside reject the stream's next wait with one
 */
export function forgetBlocks(stream: Stream, args: ForgetBlocksArguments): void {
  enqueue(stream, args, (natives) => {
    expectBlockTokens('forgetBlocks', args.blockTokens);
    loadAddon().forgetBlocks(stream.native, ...natives, args.blockTokens);
  });
}
