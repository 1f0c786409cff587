import { expect, it } from 'vitest';
import type { KvStore } from '../contracts/kv-store.js';
import { createRowBatch, type RowBatchEntry } from '../contracts/row-batch.js';
import { InvalidValueError, OutOfMemoryError } from '../errors.js';
import { Random } from '../testing/random.js';
import { describeOnDeviceKinds } from '../testing/test-devices.js';
import { densePagedStore } from './dense-paged-store.js';

const [kvHeads, headDim, blockTokens, slots, tokensPerSlot, tokens] = [2, 8, 4, 6, 40, 72];
const layer = { index: 0, queryHeads: kvHeads, kvHeads, headDim };
const blockBytes = 2 * blockTokens * headDim * 4;
/** Of one kv head. */
const poolBlocks = tokens / blockTokens + slots;
const blocksOf = (count: number) => Math.ceil(count / blockTokens);
const range = (length: number) => Array.from({ length }, (_, index) => index);

describeOnDeviceKinds('blocks that forks share', ({ open }) => {
  const device = open();
  const stream = device.createStream();
  const capacity = { device, slots, tokensPerSlot, tokens };
  const create = () => {
    const [store] = densePagedStore({ dtype: 'f32', blockTokens }).create([layer], capacity);
    return store as Required<Pick<KvStore, 'copy'>> & KvStore;
  };

  /** Tokens of these numbers: every element of a key is its token's number, and of a value the number below 0. */
  function append(store: KvStore, entries: readonly RowBatchEntry[], ids: readonly number[], prepare = true) {
    const rows = (sign: number) => {
      const elements = Float32Array.from({ length: ids.length * kvHeads * headDim }, (_, index) => {
        return sign * (ids[Math.floor(index / (kvHeads * headDim))] ?? NaN);
      });
      return device.tensor('f32', ['token', 'kvHead', 'dim'], [ids.length, kvHeads, headDim], elements);
    };
    using batch = createRowBatch(device, stream, entries);
    using keys = rows(1);
    using values = rows(-1);
    if (prepare) store.prepare(stream, batch);
    store.append(stream, { batch, keys, values });
    store.advance(batch);
  }

  function keep(store: KvStore, slot: number, kept: readonly (readonly number[])[]) {
    const counts = kept.map(({ length }) => length);
    const most = Math.max(1, ...counts);
    const elements = new Int32Array(kvHeads * most);
    kept.forEach((tokens, head) => elements.set(tokens, head * most));
    using indices = device.tensor('i32', ['kvHead', 'kept'], [kvHeads, most], elements);
    store.keep(stream, slot, { indices, counts });
  }

  /** What each kv head of each slot holds, and how many blocks all of them name. */
  async function contents(store: KvStore) {
    const blocks = store.denseBlocks();
    if (blocks === undefined) throw new Error('the store is not dense');
    const { keys, values, blockTable, keyCounts } = blocks;
    const [keyRows, valueRows] = await Promise.all([keys.read(stream), values.read(stream)]);
    const [table, counts] = await Promise.all([blockTable.read(stream), keyCounts.read(stream)]);
    const width = tokensPerSlot / blockTokens;
    const named = new Set<number>();
    const held = range(slots).map((slot) =>
      range(kvHeads).map((head) => {
        const row = slot * kvHeads + head;
        return range(counts[row] ?? NaN).map((token) => {
          const block = table[row * width + Math.floor(token / blockTokens)] ?? NaN;
          named.add(block);
          const first = (block * blockTokens + (token % blockTokens)) * headDim;
          const [key, value] = [keyRows, valueRows].map((rows) => new Set(rows.subarray(first, first + headDim)));
          const [id = NaN] = key ?? [];
          expect([key, value]).toEqual([new Set([id]), new Set([-id])]);
          return id;
        });
      }),
    );
    return { held, blocks: named.size };
  }

  it('hold what a plain model says after 10,000 random operations, and none is lost', async () => {
    const random = new Random(18);
    const store = create();
    const model = range(slots).map(() => range(kvHeads).map((): number[] => []));
    const lengths = (slot: number) => (model[slot] ?? []).map(({ length }) => length);
    const free = () => kvHeads * poolBlocks - store.bytes().device / blockBytes;
    const done = { append: 0, keep: 0, fork: 0, truncate: 0, release: 0, 'no room': 0 };
    let nextId = 1;
    /** The operation, unless there is no room for it, of which it takes no more than `most` blocks. */
    const unlessFull = (most: number, operation: () => void): boolean => {
      const [before, held] = [free(), store.bytes()];
      try {
        operation();
        return true;
      } catch (error) {
        expect(error).toBeInstanceOf(OutOfMemoryError);
        expect(before).toBeLessThan(most);
        expect(store.bytes()).toEqual(held);
        done['no room'] += 1;
        return false;
      }
    };
    const operations = {
      append(slot: number) {
        const others = range(slots).filter((other) => other !== slot && random.integer(0, 3) === 0);
        const entries = [slot, ...others].map((each) => {
          const room = tokensPerSlot - Math.max(...lengths(each));
          return { slot: each, position: 0, rows: Math.min(room, random.integer(1, 7)) };
        });
        const batch = entries.filter(({ rows }) => rows > 0);
        const ids = batch.map(({ rows }) => range(rows).map(() => nextId++));
        const most = batch.reduce((sum, { rows }) => sum + kvHeads * (blocksOf(rows) + 1), 0);
        if (batch.length === 0 || !unlessFull(most, () => append(store, batch, ids.flat()))) return;
        batch.forEach(({ slot: each }, index) => model[each]?.forEach((held) => held.push(...(ids[index] ?? []))));
        done.append += 1;
      },
      keep(slot: number) {
        const share = random.next();
        const kept = lengths(slot).map((count) => range(count).filter(() => random.next() < share));
        const most = kept.reduce((sum, { length }) => sum + blocksOf(length), 0);
        if (!unlessFull(most, () => keep(store, slot, kept))) return;
        model[slot] = (model[slot] ?? []).map((held, head) => (kept[head] ?? []).map((token) => held[token] ?? NaN));
        done.keep += 1;
      },
      fork(slot: number) {
        const empty = range(slots).find((other) => lengths(other).every((count) => count === 0));
        if (empty === undefined || empty === slot) return;
        const dropped = random.integer(0, 1) * random.integer(0, Math.min(...lengths(slot)));
        // One block a head at most, however long the sequence is.
        if (!unlessFull(kvHeads, () => store.copy(stream, slot, empty, dropped))) return;
        model[empty] = (model[slot] ?? []).map((held) => held.slice(0, held.length - dropped));
        done.fork += 1;
      },
      truncate(slot: number) {
        const tokens = random.integer(0, Math.min(...lengths(slot)));
        store.truncate(stream, slot, tokens);
        model[slot] = (model[slot] ?? []).map((held) => held.slice(0, held.length - tokens));
        done.truncate += 1;
      },
      release(slot: number) {
        store.release(stream, slot);
        model[slot] = range(kvHeads).map(() => []);
        done.release += 1;
      },
    };
    const mixture = ['append', 'append', 'append', 'append', 'fork', 'fork', 'keep', 'truncate', 'release'] as const;
    for (let step = 1; step <= 10_000; step++) {
      operations[random.pick(mixture)](random.integer(0, slots - 1));
      expect(range(slots).map((slot) => store.lengths(slot))).toEqual(range(slots).map(lengths));
      if (step % 100 > 0) continue;
      const { held, blocks } = await contents(store);
      expect(held).toEqual(model);
      expect(store.bytes().device).toBe(blocks * blockBytes);
    }
    // Enough of each to say something.
    expect(Math.min(...Object.values(done))).toBeGreaterThan(300);
    for (const slot of range(slots)) store.release(stream, slot);
    expect(store.bytes().device).toBe(0);
    // All blocks are there still, and each is handed out once.
    for (const slot of range(slots)) append(store, [{ slot, position: 0, rows: 16 }], range(16));
    expect(free()).toBe(0);
    expect((await contents(store)).blocks).toBe(kvHeads * poolBlocks);
    store.dispose();
  });

  it('are those of a prefix, when only that is forked', async () => {
    const store = create();
    append(store, [{ slot: 1, position: 0, rows: 22 }], range(22));
    for (const [slot, dropped] of [[0, 22], [2, 2], [3, 9]] as const) {
      const before = store.bytes().device;
      store.copy(stream, 1, slot, dropped);
      expect(store.lengths(slot)).toEqual([22 - dropped, 22 - dropped]);
      // Twenty tokens fill their blocks; of thirteen the last one is copied.
      expect(store.bytes().device - before).toBe(dropped === 9 ? kvHeads * blockBytes : 0);
    }
    const { held } = await contents(store);
    for (const [slot, count] of [[0, 0], [2, 20], [3, 13]] as const) expect(held[slot]?.[1]).toEqual(range(count));
    for (const dropped of [-1, 23, 1.5, NaN]) {
      expect(() => store.copy(stream, 1, 4, dropped)).toThrow(InvalidValueError);
    }
    expect(store.bytes([4]).device).toBe(0);
    store.dispose();
  });

  it('are not written to by who has not said so to prepare', async () => {
    const store = create();
    append(store, [{ slot: 0, position: 0, rows: 8 }], range(8));
    store.copy(stream, 0, 1);
    // Six tokens end in a block that the fork has whole.
    store.truncate(stream, 0, 2);
    const entry = { slot: 0, position: 6, rows: 1 };
    expect(() => append(store, [entry], [99], false)).toThrow(InvalidValueError);
    append(store, [entry], [99]);
    const { held } = await contents(store);
    expect(held[0]?.[0]).toEqual([...range(6), 99]);
    expect(held[1]?.[0]).toEqual(range(8));
    store.dispose();
  });
});
