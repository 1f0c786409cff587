import { expect, it } from 'vitest';

import { Random } from '../testing/random.js';
import { BlockIds } from './block-ids.js';

const operations = Number(process.env.KV_BLOCK_OPERATIONS ?? 20_000);

it(`counts who holds each block, and how many blocks several hold, in ${operations} random operations`, () => {
  const random = new Random(11);
  const ids = new BlockIds('blocks', 40);
  const holders = new Map<number, number>();
  let mostShared = 0;
  for (let operation = 0; operation < operations; operation++) {
    const held = [...holders.keys()];
    const choice = random.next();
    if (choice < 0.4 && ids.available > 0) {
      for (const id of ids.allocate(random.integer(1, Math.min(3, ids.available)))) {
        expect(holders.has(id)).toBe(false);
        holders.set(id, 1);
      }
    } else if (held.length > 0) {
      const id = random.pick(held);
      const count = holders.get(id) ?? 0;
      if (choice < 0.65) {
        ids.share(Int32Array.of(id));
        holders.set(id, count + 1);
      } else {
        ids.free(Int32Array.of(id));
        if (count === 1) holders.delete(id);
        else holders.set(id, count - 1);
      }
    }
    const shared = [...holders.values()].filter((count) => count > 1).length;
    if (ids.shared !== shared || ids.available !== 40 - holders.size) throw new Error(`after ${operation} operations`);
    mostShared = Math.max(mostShared, shared);
  }
  for (const [id, count] of holders) expect(ids.holders(id)).toBe(count);
  const all = Int32Array.from({ length: 40 }, (_, id) => 39 - id);
  expect([...ids.unheld(all)]).toEqual([...all].filter((id) => !holders.has(id)));
  expect(mostShared).toBeGreaterThan(5);
});
