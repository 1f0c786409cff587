import { expect, it } from 'vitest';
import { InvalidValueError, ShapeError } from '../errors.js';
import { Random } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { gatherKv } from './gather-kv.js';
import type { Device } from '../handles.js';

/** A cache of two slots whose stored bits tell block, place and dim; the blocks are in random order. */
function createCache(device: Device, random: Random, kvHeads: number, blockTokens: number, counts: number[]) {
  const [dim, width, slots] = [5, 4, 2];
  const order = Int32Array.from({ length: slots * kvHeads * width }, (_, block) => block);
  for (let last = order.length - 1; last > 0; last--) {
    const other = random.integer(0, last);
    [order[last], order[other]] = [order[other] ?? 0, order[last] ?? 0];
  }
  const bits = Uint16Array.from({ length: order.length * blockTokens * dim }, (_, index) => index);
  const pool = ['block', 'blockToken', 'dim'] as const;
  const blocks = {
    keys: device.tensor('f16', pool, [order.length, blockTokens, dim], bits),
    values: device.tensor('f16', pool, [order.length, blockTokens, dim], bits.map((x) => x ^ 0x5555)),
    blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [slots, kvHeads, width], order),
    keyCounts: device.tensor('i32', ['slot', 'kvHead'], [slots, kvHeads], Int32Array.from([...counts, ...counts])),
  };
  /** Element numbers of a token's row. */
  const place = (slot: number, head: number, token: number) => {
    const block = order[(slot * kvHeads + head) * width + Math.floor(token / blockTokens)] ?? NaN;
    const first = (block * blockTokens + (token % blockTokens)) * dim;
    return Array.from({ length: dim }, (_, d) => first + d);
  };
  return { blocks, bits, place };
}

describeOnDevices('gatherKv', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it('moves the selected tokens of each head and leaves the other slot alone', async () => {
    const random = new Random(11);
    for (let round = 0; round < 40; round++) {
      const [kvHeads, blockTokens] = [random.integer(1, 4), random.integer(1, 9)];
      const counts = Array.from({ length: kvHeads }, () => random.integer(0, 4 * blockTokens));
      const { blocks, bits, place } = createCache(device, random, kvHeads, blockTokens, counts);
      const chosen = counts.map((count) => Array.from({ length: count }, (_, i) => i).filter(() => random.next() < 0.5));
      const kept = Math.max(1, ...chosen.map((list) => list.length));
      const indices = new Int32Array(kvHeads * kept).fill(-1);
      chosen.forEach((list, head) => indices.set(list, head * kept));
      using selection = device.tensor('i32', ['kvHead', 'kept'], [kvHeads, kept], indices);
      gatherKv(stream, { blocks, slot: 1, indices: selection, counts: chosen.map((list) => list.length) });
      const [keys, values] = [await blocks.keys.read(), await blocks.values.read()];
      chosen.forEach((list, head) => {
        list.forEach((from, to) => {
          const wanted = place(1, head, from).map((element) => bits[element] ?? NaN);
          expect(place(1, head, to).map((element) => keys[element])).toEqual(wanted);
          expect(place(1, head, to).map((element) => values[element])).toEqual(wanted.map((x) => x ^ 0x5555));
        });
        for (let token = 0; token < 4 * blockTokens; token++) {
          for (const element of place(0, head, token)) expect(keys[element]).toBe(bits[element]);
        }
      });
      const newCounts = [...counts, ...chosen.map((list) => list.length)];
      expect(Array.from(await blocks.keyCounts.read())).toEqual(newCounts);
      for (const tensor of Object.values(blocks)) tensor.dispose();
    }
  });

  it.each([
    ['repeats', [3, 3]],
    ['descends', [4, 2]],
    ['reaches past the end', [1, 6]],
    ['is negative', [-1, 2]],
  ])('refuses a selection that %s, and moves nothing', async (_, wrong) => {
    using failing = device.createStream();
    const { blocks, bits } = createCache(device, new Random(12), 1, 4, [6]);
    using indices = device.tensor('i32', ['kvHead', 'kept'], [1, 2], Int32Array.from(wrong));
    gatherKv(failing, { blocks, slot: 0, indices, counts: [2] });
    await expect(failing.synchronize()).rejects.toThrow(InvalidValueError);
    await expect(failing.synchronize()).rejects.toThrow(/gatherKv.*ascend/);
    expect(await blocks.keys.read(stream)).toEqual(bits);
  });

  it('says in outcomes which heads it refused, whose first tokens stay; the others and the stream go on', async () => {
    const { blocks, bits, place } = createCache(device, new Random(14), 3, 4, [6, 6, 6]);
    using indices = device.tensor('i32', ['kvHead', 'kept'], [3, 2], Int32Array.of(4, 2, 1, 5, 0, 6));
    using outcomes = device.tensor('i32', ['kvHead'], [3], Int32Array.of(7, 7, 7));
    gatherKv(stream, { blocks, slot: 0, indices, counts: [2, 2, 2], outcomes });
    expect([...(await outcomes.read())]).toEqual([1, 0, 1]);
    expect([...(await blocks.keyCounts.read())]).toEqual([2, 2, 2, 6, 6, 6]);
    const keys = await blocks.keys.read();
    const kept = [[0, 1], [1, 5], [0, 1]];
    kept.forEach((tokens, head) => {
      tokens.forEach((from, to) => {
        const wanted = place(0, head, from).map((element) => bits[element]);
        expect(place(0, head, to).map((element) => keys[element])).toEqual(wanted);
      });
    });
    await stream.synchronize();
  });

  it('refuses counts and slots that do not fit', () => {
    const { blocks } = createCache(device, new Random(13), 2, 4, [6, 6]);
    using indices = device.tensor('i32', ['kvHead', 'kept'], [2, 3]);
    expect(() => gatherKv(stream, { blocks, slot: 0, indices, counts: [4, 1] })).toThrow(ShapeError);
    expect(() => gatherKv(stream, { blocks, slot: 0, indices, counts: [1] })).toThrow(ShapeError);
    expect(() => gatherKv(stream, { blocks, slot: 2, indices, counts: [1, 1] })).toThrow(InvalidValueError);
    using outcomes = device.tensor('i32', ['kvHead'], [3]);
    expect(() => gatherKv(stream, { blocks, slot: 0, indices, counts: [1, 1], outcomes })).toThrow(ShapeError);
  });
});
