import type { Stream, TensorHandle, TokenSelection } from '@kv/sparse-core';

import { keptTokens, selectTokens } from './operations/select-tokens.js';
import type { SelectTokensRow } from './operations/select-tokens.js';
import type { SelectTokensOptions } from './select-options.js';

/**
 * Chooses the tokens of one sequence. How many it keeps of each kv head follows from the rows, and is known at
 * once; where single tokens do not fill the capacity it depends on the scores, and is waited for.
 * @param scores f32 `[batch, kvHead, token]` of one batch entry
 */
export function enqueueSelection(
  stream: Stream,
  scores: TensorHandle<'f32', readonly ['batch', 'kvHead', 'token']>,
  rows: readonly SelectTokensRow[],
  options: SelectTokensOptions,
): TokenSelection | Promise<TokenSelection> {
  const { device } = stream;
  const kvHeads = rows.length;
  const most = rows.map(keptTokens);
  const kept = Math.max(...most);
  using counts = device.tensor('i32', ['batch', 'kvHead'], [1, kvHeads]);
  const indices = device.tensor('i32', ['kvHead', 'kept'], [kvHeads, kept]);
  const giveUp = (error: unknown): never => {
    indices.dispose();
    throw error;
  };
  try {
    const batchIndices = indices.view(['batch', 'kvHead', 'kept'], [1, kvHeads, kept]);
    selectTokens(stream, { ...options, scores, rows: [rows], indices: batchIndices, counts });
  } catch (error) {
    return giveUp(error);
  }
  if (options.remainder !== 'drop') return { indices, counts: most };
  return counts.read().then((read) => ({ indices, counts: Array.from(read) }), giveUp);
}
