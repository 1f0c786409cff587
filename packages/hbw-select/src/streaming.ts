import type { KvSelector } from '@kv/sparse-core';
import { expectOptions } from '@kv/sparse-core/native';

import { capacityOf } from './capacity.js';
import type { Capacity } from './capacity.js';
import { enqueueSelection } from './enqueue-selection.js';
import { expectWhole } from './expect.js';

export interface StreamingSettings {
  /** The prompt's first tokens, which are kept and count. Default: 4. */
  readonly sinkTokens?: number | undefined;
}

/**
 * StreamingLLM (Xiao et al. 2023) at the end of a prompt: its first tokens and its last ones, without a look at
 * what they say.
 * @throws InvalidValueError
 */
export function streaming(options: Capacity & StreamingSettings): KvSelector {
  expectOptions('streaming', options, { capacity: true, keepRatio: true, sinkTokens: true });
  const { sinkTokens = 4 } = options;
  const capacityFor = capacityOf(options);
  expectWhole('streaming', 'sinkTokens', sinkTokens);
  return {
    name: 'streaming',
    observationWindow: 0,
    select(stream, { store, slot, tokens }) {
      const lengths = store.lengths(slot);
      const rows = lengths.map((length) => {
        const capacity = Math.min(length, capacityFor(store.layer.index, tokens));
        const windowTokens = Math.max(0, capacity - sinkTokens);
        return { prefixTokens: length - windowTokens, windowTokens, capacity, blockTokens: 1 };
      });
      if (rows.every((row, head) => row.capacity === lengths[head])) return undefined;
      // Sinks and window take the whole capacity: no score is read.
      const shape = [1, rows.length, Math.max(...lengths)] as const;
      using scores = stream.device.tensor('f32', ['batch', 'kvHead', 'token'], shape);
      return enqueueSelection(stream, scores, rows, { sinkTokens });
    },
  };
}
