import { expect, it } from 'vitest';
import { CapabilityError, DTypeError, InvalidValueError, ShapeError } from '../errors.js';
import { Random } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { writeEntries } from './write-entries.js';

describeOnDevices('writeEntries', ({ open }) => {
  const device = open();
  const stream = device.createStream();
  const list = (...numbers: number[]) => Int32Array.from(numbers);

  it.each([false, true])('writes the entries that it is told and no other; sorted: %s', async (isSorted) => {
    const random = new Random(32);
    for (const most of [1, 7, 300, 70_000]) {
      const [rows, columns] = [random.integer(1, most), random.integer(1, 5)];
      const wanted = Int32Array.from({ length: rows * columns }, () => random.integer(-(2 ** 31), 2 ** 31 - 1));
      using table = device.tensor('i32', ['row', 'column'], [rows, columns], wanted);
      const places = new Set(Array.from({ length: random.integer(0, rows) }, () => random.integer(0, rows * columns - 1)));
      const at = Int32Array.from(places);
      if (isSorted) at.sort();
      const entries = at.map(() => random.integer(-(2 ** 31), 2 ** 31 - 1));
      at.forEach((place, index) => (wanted[place] = entries[index] ?? 0));
      writeEntries(stream, { table, at, entries });
      // The lists were taken.
      at.fill(0);
      entries.fill(0);
      expect(await table.read()).toEqual(wanted);
    }
  });

  it('writes a part of a table', async () => {
    using table = device.tensor('i32', ['row', 'column'], [3, 2], new Int32Array(6));
    writeEntries(stream, { table: table.slice('row', 1, 3), at: list(3, 0), entries: list(7, 8) });
    expect(await table.read()).toEqual(list(0, 0, 8, 0, 0, 7));
  });

  it('writes nothing where nothing is listed', async () => {
    using table = device.tensor('i32', ['row'], [2], list(5, 6));
    writeEntries(device.createStream(), { table, at: list(), entries: list() });
    expect(await table.read(stream)).toEqual(list(5, 6));
  });

  it.each([
    ['a place before the table', list(1, -1), list(1, 2), InvalidValueError],
    ['a place behind the table', list(4, 1), list(1, 2), InvalidValueError],
    ['a place twice', list(3, 1, 3), list(1, 2, 3), InvalidValueError],
    ['a place twice in a row', list(1, 1), list(1, 2), InvalidValueError],
    ['lists of different lengths', list(1, 2), list(1), ShapeError],
    ['numbers that are not whole', Float32Array.of(1) as unknown as Int32Array, list(1), DTypeError],
  ])('refuses %s', async (_, at, entries, error) => {
    using table = device.tensor('i32', ['row'], [4], list(5, 6, 7, 8));
    expect(() => {
      writeEntries(stream, { table, at, entries });
    }).toThrow(error);
    expect(await table.read(stream)).toEqual(list(5, 6, 7, 8));
  });

  it('is no part of a recording', () => {
    using table = device.tensor('i32', ['row'], [4], new Int32Array(4));
    expect(() =>
      stream.record(() => {
        writeEntries(stream, { table, at: list(1), entries: list(2) });
      }),
    ).toThrow(CapabilityError);
  });
});
