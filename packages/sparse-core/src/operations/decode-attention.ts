import type { Stream } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { type AttentionArguments, attentionRules, attentionSettings, expectHeads, pagedRowRules } from './attention-arguments.js';

const enqueue = operation('decodeAttention', [...attentionRules, ...pagedRowRules], ['output', 'logSumExp']);

/**
 * What `prefillAttention` computes, for one new row per sequence (or a few): the keys of each sequence are
 * split among the threads and the parts merged by their log-sum-exp (Flash-Decoding, Dao et al. 2023), so
 * that the cache is read once at the speed of the memory. The result does not depend on batch neighbours,
 * thread count or the order of blocks.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function decodeAttention(stream: Stream, args: AttentionArguments): void {
  enqueue(stream, args, (natives, [query, , , , , , keyCounts]) => {
    expectHeads('decodeAttention', query, keyCounts.shape[1]);
    loadAddon().decodeAttention(stream.native, ...natives, ...attentionSettings('decodeAttention', args));
  });
}
