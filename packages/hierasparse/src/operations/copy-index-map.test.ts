import { DTypeError, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { blockEntry, blockNumber, isDense, noBlock } from '@kv/sparse-core/native';
import { describeOnDevices, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { copyIndexMap } from './copy-index-map.js';

const axes = ['slot', 'kvHead', 'block'] as const;
const range = (length: number) => Array.from({ length }, (_, index) => index);

describeOnDevices('copyIndexMap', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it('names the copy of every block, and the block itself where there is none', async () => {
    const random = new Random(41);
    const shuffled = (length: number) => range(length).sort(() => random.integer(0, 1) - 0.5);
    for (let round = 0; round < 30; round++) {
      const [slots, kvHeads, width] = [random.integer(2, 4), random.integer(1, 3), random.integer(1, 700)];
      // Blocks of either kind, a part of which is copied.
      const kinds = { dense: shuffled(random.integer(1, 900)), sparse: shuffled(random.integer(1, 900)) };
      const copiesOf = (blocks: readonly number[]) => {
        const from = blocks.slice(0, random.integer(0, blocks.length));
        return { from, to: from.map(() => random.integer(0, 100_000)) };
      };
      const copies = { dense: copiesOf(kinds.dense), sparse: copiesOf(kinds.sparse) };
      const entry = () => {
        const kind = random.pick(['dense', 'sparse24', 'none'] as const);
        return kind === 'none' ? noBlock : blockEntry(kind, random.integer(0, 900));
      };
      const before = () => Int32Array.from({ length: slots * kvHeads * width }, entry);
      const maps = { keys: before(), values: before() };
      using keys = device.tensor('i32', axes, [slots, kvHeads, width], maps.keys);
      using values = device.tensor('i32', axes, [slots, kvHeads, width], maps.values);
      const [fromSlot, toSlot] = [slots - 1, random.integer(0, slots - 1)];
      copyIndexMap(stream, { keys, values, fromSlot, toSlot, ...copies });

      const renamed = (given: number) => {
        const { from, to } = isDense(given) ? copies.dense : copies.sparse;
        const copy = to[from.indexOf(blockNumber(given))];
        return given === noBlock || copy === undefined ? given : blockEntry(isDense(given) ? 'dense' : 'sparse24', copy);
      };
      const row = kvHeads * width;
      for (const map of Object.values(maps)) {
        map.set(map.subarray(fromSlot * row, (fromSlot + 1) * row).map(renamed), toSlot * row);
      }
      expect({ keys: await keys.read(stream), values: await values.read(stream) }).toEqual(maps);
    }
  });

  const none = { from: [], to: [] };
  it.each([
    ['a slot that does not exist', { fromSlot: 3 }],
    ['a slot that is no whole number', { toSlot: 0.5 }],
    ['lists of different lengths', { dense: { from: [0, 1], to: [2] } }],
    ['a negative block', { sparse: { from: [-1], to: [2] } }],
    ['a copy that is no whole number', { sparse: { from: [1], to: [1.5] } }],
    ['a copy that no entry can name', { dense: { from: [1], to: [2 ** 31 - 1] } }],
    ['a sparse copy that no entry can name', { sparse: { from: [1], to: [2 ** 28] } }],
    ['a block twice', { dense: { from: [4, 7, 4], to: [1, 2, 3] } }],
  ])('refuses %s', async (_, bad) => {
    const entries = Int32Array.from({ length: 3 * 2 * 4 }, (__, index) => index);
    using keys = device.tensor('i32', axes, [3, 2, 4], entries);
    using values = device.tensor('i32', axes, [3, 2, 4], entries);
    expect(() => {
      copyIndexMap(stream, { keys, values, fromSlot: 0, toSlot: 1, dense: none, sparse: none, ...bad });
    }).toThrow(InvalidValueError);
    expect([await keys.read(stream), await values.read(stream)]).toEqual([entries, entries]);
  });

  it('refuses tables that are none', () => {
    const slots = { fromSlot: 0, toSlot: 1, dense: none, sparse: none };
    using keys = device.tensor('i32', axes, [2, 2, 4]);
    using values = device.tensor('i32', axes, [2, 2, 4]);
    using floats = device.tensor('f32', axes, [2, 2, 4]);
    expect(() => copyIndexMap(stream, { ...slots, keys: keys.slice('block', 0, 2), values })).toThrow(ShapeError);
    expect(() => copyIndexMap(stream, { ...slots, keys, values: values.slice('kvHead', 0, 1) })).toThrow(ShapeError);
    expect(() => copyIndexMap(stream, { ...slots, keys, values: floats as never })).toThrow(DTypeError);
  });
});
