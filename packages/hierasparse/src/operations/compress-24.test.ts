import { CapabilityError, type Device, DTypeError, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { blockEntry, blockNumber, isDense, noBlock } from '@kv/sparse-core/native';
import { decode, describeOnDevices, encode, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { ElementMask } from '../element-mask.js';
import { type KvOperand, type SparseDType } from '../blocks-24.js';
import { type PoolSizes, readPools, testPools } from '../testing/test-pools-24.js';
import { expanded, groupsOfFour, pruned } from '../testing/sparse-oracle.js';
import { compress24 } from './compress-24.js';

const formats = (['keys', 'values'] as const).flatMap((operand) =>
  (['f16', 'bf16'] as const).flatMap((dtype) => [64, 128].map((headDim) => ({ operand, dtype, headDim }))),
);

/** One kv head of one slot whose blocks are the pool's dense ones, in the order of `ids`. */
function oneHead(device: Device, dtype: SparseDType, headDim: number, contents: Uint16Array, ids: readonly number[]) {
  const denseBlocks = contents.length / (64 * headDim);
  const sizes: PoolSizes = { dtype, headDim, denseBlocks, sparseBlocks: ids.length + 2, table: [1, 1, ids.length] };
  return testPools(device, sizes, contents, Int32Array.from(ids));
}

const range = (length: number) => Array.from({ length }, (_, index) => index);

/** Sets elements that a pruner may stumble over: signed zeros, infinities, NaN, ties, groups of nothing. */
function withOddities(random: Random, elements: Uint16Array, infinity: number): Uint16Array {
  const odd = [0, 0x8000, infinity, infinity | 0x8000, infinity | 1, 0x8001, 0x3c00, 0xbc00];
  return elements.map((element) => (random.next() < 0.5 ? element : random.pick(odd)));
}

describeOnDevices('compress24', ({ open }) => {
  it.each(formats)('keeps two of four, bit for bit, where the layout says ($operand $dtype $headDim)', async (format) => {
    const { operand, dtype, headDim } = format;
    const device = open();
    const stream = device.createStream();
    const random = new Random(1);
    const contents = withOddities(random, random.elements(dtype, 3 * 64 * headDim), dtype === 'f16' ? 0x7c00 : 0x7f80);
    // Groups of nothing but zeros of either sign, along tokens and dims.
    contents.fill(0, 0, 4 * headDim);
    contents.fill(0x8000, 4 * headDim, 8 * headDim);
    const blocks = oneHead(device, dtype, headDim, contents, [2, 0, 1]);
    const pruning = { slot: 0, kvHead: 0, firstBlock: 0, endBlock: 3, sparseIds: [4, 1, 0], freedFrom: 0 };
    compress24(stream, { operand, blocks, prunings: [pruning] });
    const { table, nonZeros, metadata } = await readPools(stream, blocks);
    expect([...table]).toEqual([4, 1, 0].map((id) => blockEntry('sparse24', id)));
    [4, 1, 0].forEach((sparse, block) => {
      const first = ([2, 0, 1][block] ?? 0) * 64 * headDim;
      const wanted = pruned(operand, headDim, contents.slice(first, first + 64 * headDim));
      expect(expanded(operand, headDim, nonZeros(sparse), metadata(sparse))).toEqual(wanted);
    });
    // Sparse blocks that were not asked for are as they were.
    for (const other of [2, 3]) expect(new Set(metadata(other))).toEqual(new Set([0xdeadbeef]));
  });

  it.each(formats)('writes indices that ascend, all six patterns of them ($operand $dtype $headDim)', async (format) => {
    const { operand, dtype, headDim } = format;
    const device = open();
    const stream = device.createStream();
    const contents = new Uint16Array(64 * headDim);
    const patterns = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]] as const;
    groupsOfFour(operand, headDim).forEach((group, index) => {
      for (const kept of patterns[index % 6] ?? []) contents[group[kept] ?? 0] = 0x3c00 + (index % 7);
    });
    const blocks = oneHead(device, dtype, headDim, contents, [0]);
    const pruning = { slot: 0, kvHead: 0, firstBlock: 0, endBlock: 1, sparseIds: [0], freedFrom: 0 };
    compress24(stream, { operand, blocks, prunings: [pruning] });
    const { nonZeros, metadata } = await readPools(stream, blocks);
    expect(expanded(operand, headDim, nonZeros(0), metadata(0))).toEqual(contents);
    const nibbles = [...metadata(0)].flatMap((word) => range(8).map((n) => (word >>> (4 * n)) & 15));
    expect(new Set(nibbles)).toEqual(new Set(patterns.map(([first, second]) => (second << 2) | first)));
  });

  it('makes the blocks of least loss sparse, equal ones in order, and packs the dense ones', async () => {
    const device = open();
    const random = new Random(2);
    for (const { operand, dtype, headDim } of formats) {
      const blocks = 9;
      // Small whole numbers: every loss is exact, and many are equal.
      const contents: Uint16Array = encode(dtype, range(blocks * 64 * headDim).map(() => random.integer(-2, 2)));
      const ids = [...random.permutation(blocks)];
      contents.copyWithin((ids[6] ?? 0) * 64 * headDim, (ids[3] ?? 0) * 64 * headDim, ((ids[3] ?? 0) + 1) * 64 * headDim);
      const content = (id: number) => contents.slice(id * 64 * headDim, (id + 1) * 64 * headDim);
      const losses = ids.map((id) => {
        const sum = (elements: Uint16Array) => decode(dtype, elements).reduce((total, x) => total + Math.abs(x), 0);
        return sum(content(id)) - sum(pruned(operand, headDim, content(id)));
      });
      const candidates = range(blocks).slice(1, 8);
      for (const count of [0, 1, 4, 7]) {
        const stream = device.createStream();
        const pools = oneHead(device, dtype, headDim, contents, ids);
        const candidateIds = candidates.map((block) => ids[block] ?? 0).sort((a, b) => a - b);
        const freed = candidateIds.slice(candidateIds.length - count);
        const sparseIds = [...random.permutation(blocks + 2)].slice(0, count);
        const pruning = { slot: 0, kvHead: 0, firstBlock: 1, endBlock: 8, sparseIds, freedFrom: freed[0] ?? blocks };
        compress24(stream, { operand, blocks: pools, prunings: [pruning] });
        const after = await readPools(stream, pools);
        const wanted = [...candidates]
          .sort((a, b) => (losses[a] ?? 0) - (losses[b] ?? 0) || a - b)
          .slice(0, count)
          .sort((a, b) => a - b);
        const entries = [...after.table];
        expect(range(blocks).filter((block) => (entries[block] ?? 0) < 0)).toEqual(wanted);
        expect(wanted.map((block) => blockNumber(entries[block] ?? NaN))).toEqual(sparseIds);
        for (const block of range(blocks)) {
          const entry = entries[block] ?? 0;
          const before = content(ids[block] ?? 0);
          const number = blockNumber(entry);
          if (!isDense(entry)) {
            const kept = expanded(operand, headDim, after.nonZeros(number), after.metadata(number));
            expect(kept).toEqual(pruned(operand, headDim, before));
          } else {
            expect(freed).not.toContain(number);
            expect(after.dense(number)).toEqual(before);
          }
        }
        expect(new Set(entries).size).toBe(blocks);
      }
    }
  });

  it('takes losses that f16 could not hold', async () => {
    const device = open();
    const stream = device.createStream();
    // 2,048 numbers are lost of each block, of 60,000 or a bit less.
    const contents = encode('f16', range(3 * 64 * 64).map((index) => 60_000 - 32 * Math.floor(index / (64 * 64))));
    const blocks = oneHead(device, 'f16', 64, contents, [0, 1, 2]);
    const pruning = { slot: 0, kvHead: 0, firstBlock: 0, endBlock: 3, sparseIds: [0], freedFrom: 2 };
    compress24(stream, { operand: 'keys', blocks, prunings: [pruning] });
    expect([...(await blocks.table.read(stream))].map(isDense)).toEqual([true, true, false]);
  });

  it('prunes many heads at once, and the same ones further', async () => {
    const device = open();
    const stream = device.createStream();
    const random = new Random(3);
    const [slots, kvHeads, width, headDim] = [3, 2, 6, 64];
    const contents = random.elements('f16', slots * kvHeads * width * 64 * headDim);
    const order = random.permutation(slots * kvHeads * width);
    const sizes: PoolSizes = {
      dtype: 'f16',
      headDim,
      denseBlocks: order.length,
      sparseBlocks: order.length,
      table: [slots, kvHeads, width],
    };
    const pools = testPools(device, sizes, contents, order);
    const freeSparse = [...random.permutation(order.length)];
    const held = range(slots * kvHeads).map((row) => [...order.slice(row * width, (row + 1) * width)].sort((a, b) => a - b));
    // Of the rows of slots 0 and 2, two blocks, then two more.
    for (let round = 0; round < 2; round++) {
      const prunings = [0, 1, 4, 5].map((row) => {
        const freed = held[row]?.splice(-2) ?? [];
        const sparseIds = freeSparse.splice(0, 2);
        const [slot, kvHead] = [Math.floor(row / kvHeads), row % kvHeads];
        return { slot, kvHead, firstBlock: 0, endBlock: width, sparseIds, freedFrom: freed[0] ?? 0 };
      });
      compress24(stream, { operand: 'values', blocks: pools, prunings });
    }
    const after = await readPools(stream, pools);
    for (const row of range(slots * kvHeads)) {
      const entries = [...after.table.slice(row * width, (row + 1) * width)];
      expect(entries.filter((entry) => entry < 0)).toHaveLength(row === 2 || row === 3 ? 0 : 4);
      expect(entries.filter(isDense).sort((a, b) => a - b)).toEqual(held[row]);
      entries.forEach((entry, block) => {
        const id = order[row * width + block] ?? 0;
        const before = contents.slice(id * 64 * headDim, (id + 1) * 64 * headDim);
        const number = blockNumber(entry);
        const now = isDense(entry) ? after.dense(number) : expanded('values', headDim, after.nonZeros(number), after.metadata(number));
        expect(now).toEqual(isDense(entry) ? before : pruned('values', headDim, before));
      });
    }
  });

  it('takes prunings of more heads than a grid of CUDA has rows', async () => {
    const device = open();
    const stream = device.createStream();
    const contents = new Random(6).elements('f16', 64 * 64);
    const [slots, kvHeads] = [8200, 8];
    // Only the last one has a block.
    const table = new Int32Array(slots * kvHeads).fill(noBlock);
    table[table.length - 1] = 0;
    const sizes: PoolSizes = { dtype: 'f16', headDim: 64, denseBlocks: 1, sparseBlocks: 1, table: [slots, kvHeads, 1] };
    const blocks = testPools(device, sizes, contents, table);
    const prunings = range(slots * kvHeads).map((row) => ({
      slot: Math.floor(row / kvHeads),
      kvHead: row % kvHeads,
      firstBlock: 0,
      endBlock: 1,
      sparseIds: table[row] === 0 ? [0] : [],
      freedFrom: 0,
    }));
    compress24(stream, { operand: 'keys', blocks, prunings });
    const { nonZeros, metadata, table: after } = await readPools(stream, blocks);
    expect(after.at(-1)).toBe(blockEntry('sparse24', 0));
    expect(expanded('keys', 64, nonZeros(0), metadata(0))).toEqual(pruned('keys', 64, contents));
  });

  it('prunes blocks that would lose an infinity or a NaN last', async () => {
    const device = open();
    const stream = device.createStream();
    const contents = new Random(4).elements('f16', 3 * 64 * 64);
    // Three infinities among four neighbours of a key: one is lost. Three NaNs in another block.
    for (const index of [0, 1, 2]) contents[index] = 0x7c00;
    for (const index of [0, 1, 2]) contents[64 * 64 + index] = 0x7e00;
    const blocks = oneHead(device, 'f16', 64, contents, [0, 1, 2]);
    const pruning = (sparseIds: number[], freedFrom: number) => ({ slot: 0, kvHead: 0, firstBlock: 0, endBlock: 3, sparseIds, freedFrom });
    compress24(stream, { operand: 'keys', blocks, prunings: [pruning([0], 2)] });
    expect([...(await blocks.table.read(stream))].map(isDense)).toEqual([true, true, false]);
    compress24(stream, { operand: 'keys', blocks, prunings: [pruning([1], 1)] });
    expect([...(await blocks.table.read(stream))].map(isDense)).toEqual([false, true, false]);
  });

  it('takes the first of blocks that would lose a NaN, whatever their payloads', async () => {
    const device = open();
    const stream = device.createStream();
    const contents = new Random(8).elements('f16', 3 * 64 * 64);
    for (const index of [0, 1, 2]) contents[index] = 0x7e05;
    for (const index of [0, 1, 2]) contents[64 * 64 + index] = 0x7e01;
    const blocks = oneHead(device, 'f16', 64, contents, [0, 1, 2]);
    const pruning = { slot: 0, kvHead: 0, firstBlock: 0, endBlock: 3, sparseIds: [0, 1], freedFrom: 1 };
    compress24(stream, { operand: 'keys', blocks, prunings: [pruning] });
    expect([...(await blocks.table.read(stream))].map(isDense)).toEqual([false, true, false]);
  });

  it('makes the blocks of least given loss sparse, whatever they hold', async () => {
    const device = open();
    const random = new Random(9);
    const [slots, kvHeads, width] = [2, 2, 300];
    const total = slots * kvHeads * width;
    const odd = [NaN, -NaN, Infinity, -Infinity, 0, -0, 2 ** -149, -(2 ** -149), 1, 1, -1];
    const losses = Float32Array.from({ length: total }, () => (random.next() < 0.5 ? random.pick(odd) : random.next() - 0.5));
    const sizes: PoolSizes = { dtype: 'f16', headDim: 64, denseBlocks: total, sparseBlocks: 2 * width, table: [slots, kvHeads, width] };
    const ids = Int32Array.from({ length: total }, (_, index) => index);
    using blockLoss = device.tensor('f32', ['slot', 'kvHead', 'block'], [slots, kvHeads, width], losses);
    for (const count of [1, 40, 149, 290]) {
      const stream = device.createStream();
      const blocks = testPools(device, sizes, new Uint16Array(total * 64 * 64), ids);
      // Of the second head of either slot, all blocks but the first two and the last.
      const prunings = range(slots).map((slot) => {
        const sparseIds = range(count).map((index) => slot * width + index);
        const freedFrom = (slot * kvHeads + 2) * width - 1 - count;
        return { slot, kvHead: 1, firstBlock: 2, endBlock: width - 1, sparseIds, freedFrom };
      });
      compress24(stream, { operand: 'values', blocks, prunings, blockLoss });
      const table = await blocks.table.read(stream);
      for (const slot of range(slots)) {
        const first = (slot * kvHeads + 1) * width;
        const loss = (block: number) => losses[first + block] ?? NaN;
        const order = (a: number, b: number) => {
          const [nanA, nanB] = [Number.isNaN(loss(a)), Number.isNaN(loss(b))];
          if (nanA || nanB) return Number(nanA) - Number(nanB) || a - b;
          return loss(a) < loss(b) ? -1 : loss(a) > loss(b) ? 1 : a - b;
        };
        const wanted = range(width).slice(2, -1).sort(order).slice(0, count);
        const sparse = range(width).filter((block) => (table[first + block] ?? 0) < 0);
        expect(sparse).toEqual(wanted.sort((a, b) => a - b));
      }
      expect(table.filter((entry) => entry < 0)).toHaveLength(slots * count);
    }
  });

  it.each(['keys', 'values'] as const)('keeps what an element mask says (%s)', async (operand) => {
    const device = open();
    const stream = device.createStream();
    const random = new Random(5);
    const headDim = 128;
    const contents = random.elements('bf16', 2 * 64 * headDim);
    const kept = new Uint8Array(64 * headDim);
    for (const group of groupsOfFour(operand, headDim)) {
      for (const place of [...random.permutation(4)].slice(0, random.integer(0, 2))) kept[group[place] ?? 0] = 1;
    }
    const blocks = oneHead(device, 'bf16', headDim, contents, [0, 1]);
    using elementMask = new ElementMask(device, operand, headDim, kept);
    const pruning = { slot: 0, kvHead: 0, firstBlock: 0, endBlock: 2, sparseIds: [0, 1], freedFrom: 0 };
    compress24(stream, { operand, blocks, prunings: [pruning], elementMask });
    const { nonZeros, metadata } = await readPools(stream, blocks);
    for (const block of [0, 1]) {
      const before = contents.slice(block * 64 * headDim, (block + 1) * 64 * headDim);
      const wanted = before.map((element, index) => (kept[index] === 0 ? 0 : element));
      expect(expanded(operand, headDim, nonZeros(block), metadata(block))).toEqual(wanted);
      const nibbles = [...metadata(block)].flatMap((word) => range(8).map((n) => (word >>> (4 * n)) & 15));
      expect(nibbles.every((nibble) => nibble >> 2 > (nibble & 3))).toBe(true);
    }
  });

  it('refuses masks that keep more than two of four', () => {
    const device = open();
    const mask = (operand: KvOperand, places: readonly number[]) => {
      const kept = new Uint8Array(64 * 64);
      for (const place of places) kept[place] = 1;
      return () => new ElementMask(device, operand, 64, kept);
    };
    expect(mask('keys', [4, 5, 7])).toThrow(CapabilityError);
    expect(mask('values', [4 * 64 + 9, 5 * 64 + 9, 7 * 64 + 9])).toThrow(CapabilityError);
    // The same places are of different groups the other way.
    mask('values', [4, 5, 7])().dispose();
    mask('keys', [4 * 64 + 9, 5 * 64 + 9, 7 * 64 + 9])().dispose();
    expect(() => new ElementMask(device, 'keys', 64, new Uint8Array(100))).toThrow(ShapeError);
    expect(() => new ElementMask(device, 'keys', 96, new Uint8Array(64 * 96))).toThrow(CapabilityError);
    expect(() => new ElementMask(device, 'key' as never, 64, new Uint8Array(64 * 64))).toThrow(InvalidValueError);
    expect(() => new ElementMask(device, 'keys', 64, new Array(64 * 64).fill(0) as never)).toThrow(DTypeError);
  });

  it('refuses bad input with a typed error', async () => {
    const device = open();
    const contents = new Random(6).elements('f16', 2 * 64 * 64);
    const blocks = oneHead(device, 'f16', 64, contents, [0, 1]);
    const good = { slot: 0, kvHead: 0, firstBlock: 0, endBlock: 2, sparseIds: [0], freedFrom: 1 };
    const call = (pruning: object) => {
      const stream = device.createStream();
      compress24(stream, { operand: 'keys', blocks, prunings: [{ ...good, ...pruning }] });
      return stream.synchronize();
    };
    expect(() => call({ slot: 1 })).toThrow(InvalidValueError);
    expect(() => call({ endBlock: 3 })).toThrow(InvalidValueError);
    const stream = device.createStream();
    expect(() => compress24(stream, { operand: 'keys', blocks, prunings: [good, good] })).toThrow(InvalidValueError);
    const narrow = device.tensor('f16', ['block', 'blockToken', 'dim'], [2, 64, 32]);
    expect(() => compress24(stream, { operand: 'keys', blocks: { ...blocks, dense: narrow }, prunings: [good] })).toThrow(
      CapabilityError,
    );
    using mask = new ElementMask(device, 'values', 64, new Uint8Array(64 * 64));
    expect(() => compress24(stream, { operand: 'keys', blocks, prunings: [good], elementMask: mask })).toThrow(ShapeError);
    const lossOf = (shape: readonly [number, number, number]) => ({
      operand: 'keys' as const,
      blocks,
      prunings: [good],
      blockLoss: device.tensor('f32', ['slot', 'kvHead', 'block'], shape),
    });
    expect(() => compress24(stream, lossOf([1, 1, 3]))).toThrow(ShapeError);
    const { blockLoss: wide } = lossOf([1, 1, 4]);
    const gaps = wide.view(['slot', 'kvHead', 'block', 'half'], [1, 1, 2, 2]).slice('half', 0, 1);
    expect(() => compress24(stream, { ...lossOf([1, 1, 2]), blockLoss: gaps as never })).toThrow(ShapeError);
    for (const id of [9, -1, 0.5, NaN, 2 ** 32]) expect(() => call({ sparseIds: [id] })).toThrow(InvalidValueError);
    for (const freedFrom of [-1, 1.5, NaN, 2 ** 32 + 1]) expect(() => call({ freedFrom })).toThrow(InvalidValueError);
    expect(() => call({ sparseIds: [1, 1], freedFrom: 0 })).toThrow(InvalidValueError);
    const unchecked = { operand: 'keys' as const, kept: device.tensor('u8', ['kvHead', 'blockToken', 'dim'], [1, 64, 64]) };
    expect(() => compress24(stream, { operand: 'keys', blocks, prunings: [good], elementMask: unchecked as never })).toThrow(
      InvalidValueError,
    );
    expect(() => compress24(stream, { operand: 'key' as never, blocks, prunings: [good] })).toThrow(InvalidValueError);
    // What only the device knows: more blocks than there are dense ones.
    await expect(call({ sparseIds: [0, 1, 2], freedFrom: 0 })).rejects.toThrow(InvalidValueError);
    await expect(call({ freedFrom: 0 })).rejects.toThrow(InvalidValueError);
    await call({});
  });
});
