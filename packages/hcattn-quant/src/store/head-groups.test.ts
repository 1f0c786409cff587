import { createDevice } from '@kv/sparse-core';
import { expect, it } from 'vitest';
import { headBoundsOf } from './head-groups.js';

it.each([
  { kvHeads: 8, tokens: 2 ** 18, bounds: [0, 8] },
  { kvHeads: 8, tokens: 2 ** 19, bounds: [0, 4, 8] },
  { kvHeads: 8, tokens: 3 * 2 ** 18, bounds: [0, 3, 5, 8] },
  { kvHeads: 8, tokens: 2 ** 20, bounds: [0, 2, 4, 6, 8] },
  { kvHeads: 8, tokens: 2 ** 22, bounds: [0, 2, 4, 6, 8] },
  { kvHeads: 32, tokens: 2 ** 20, bounds: [0, 8, 16, 24, 32] },
  { kvHeads: 6, tokens: 2 ** 20, bounds: [0, 2, 3, 5, 6] },
  { kvHeads: 2, tokens: 2 ** 20, bounds: [0, 1, 2] },
  { kvHeads: 1, tokens: 2 ** 20, bounds: [0, 1] },
])('puts kv heads in groups where the cache is large: $kvHeads, $tokens', ({ kvHeads, tokens, bounds }) => {
  const device = createDevice({ threads: 1 });
  expect(headBoundsOf({ kvHeads }, { device, slots: 4, tokensPerSlot: tokens, tokens })).toEqual(bounds);
  expect(headBoundsOf({ kvHeads }, { device, slots: 1, tokensPerSlot: 4096, tokens })).toEqual([0, kvHeads]);
});
