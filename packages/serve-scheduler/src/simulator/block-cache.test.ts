import { expect, it } from 'vitest';

import { BlockCache } from './block-cache.js';
import { Random } from './random.js';

const operations = Number(process.env.KV_BLOCK_OPERATIONS ?? 50_000);

it(`holds what a list in the order of use would hold, in ${operations} random operations`, () => {
  const random = new Random(5);
  const cache = new BlockCache(64);
  let list: number[] = [];
  let capacity = 64;
  for (let operation = 0; operation < operations; operation++) {
    const choice = random.next();
    if (choice < 0.1) {
      const block = random.below(4) * 1000 + random.below(40);
      cache.offer(block);
      if (list.length < capacity && !list.includes(block)) list = [block, ...list];
    } else if (choice < 0.98) {
      const block = random.below(4) * 1000 + random.below(40);
      if (cache.read(block) !== list.includes(block)) throw new Error(`block ${block} after ${operation} operations`);
      list = capacity === 0 ? [] : [...list.filter((each) => each !== block), block].slice(-capacity);
    } else if (choice < 0.99) {
      capacity = random.below(65);
      cache.resize(capacity);
      list = capacity === 0 ? [] : list.slice(-capacity);
    } else {
      const first = 1000 * random.below(4);
      cache.forget(first, first + 1000);
      list = list.filter((each) => each < first || each >= first + 1000);
    }
    if (operation % 50 === 0) expect(cache.blocks).toEqual(list);
  }
  expect(cache.size).toBe(list.length);
});
