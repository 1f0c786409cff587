import type { Stream } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { type AttentionArguments, attentionRules, attentionSettings, expectHeads, pagedRowRules } from './attention-arguments.js';

const enqueue = operation('prefillAttention', [...attentionRules, ...pagedRowRules], ['output', 'logSumExp']);

/**
 * Dense attention of prompts, or of chunks of them whose earlier keys are in the cache (FlashAttention-2, Dao
 * 2023, algorithm 1), for a batch of sequences of different lengths:
 * `output[i, h] = sum_j softmax_j(scale * query[i, h] . key[j]) value[j]` over the keys that query i sees,
 * where query head h reads kv head `floor(h / (queryHeads / kvHeads))`. Arithmetic is f32.
 *
 * The rows' own keys and values are in `blocks` already, and counted. The result does not depend on batch
 * neighbours, thread count, chunk sizes or the order of blocks. A count, slot or block outside its tensor
 * rejects the stream's next wait with an InvalidValueError.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function prefillAttention(stream: Stream, args: AttentionArguments): void {
  enqueue(stream, args, (natives, [query, , , , , , keyCounts]) => {
    expectHeads('prefillAttention', query, keyCounts.shape[1]);
    loadAddon().prefillAttention(stream.native, ...natives, ...attentionSettings('prefillAttention', args));
  });
}
