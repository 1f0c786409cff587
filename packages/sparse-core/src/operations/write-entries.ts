import { expectElements } from '../dtype.js';
import { InvalidValueError } from '../errors.js';
import type { Stream, TensorHandle } from '../handles.js';
import { elementCount } from '../layout.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { expectObject, reading } from '../validate.js';

export interface WriteEntriesArguments {
  /** i32, contiguous, of any axes. */
  readonly table: TensorHandle<'i32'>;
  /** Which of its entries, counted in row-major order; none twice. */
  readonly at: Int32Array;
  /** What they become: one for each. */
  readonly entries: Int32Array;
}

const name = 'writeEntries';
const enqueue = operation(name, [{ name: 'table', dtype: ['i32'], shape: ['row', '...'], layout: 'contiguous' }], ['table']);

/**
 * Writes entries of a table, wherever they are, by one call: `table[at[i]] = entries[i]`. The lists are taken at once.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, CapabilityError while the stream is recorded
 * @throws InvalidValueError for entries that the table does not have, or one that appears twice
 */
export function writeEntries(stream: Stream, args: WriteEntriesArguments): void {
  enqueue(stream, args, ([table], [{ shape }]) => {
    const { at, entries } = args;
    expectObject(name, 'at', at);
    const count = reading(`${name}: at`, () => at.length);
    expectElements(name, 'i32', count, at);
    expectElements(name, 'i32', count, entries);
    const list = new Int32Array(2 * count);
    list.set(at);
    list.set(entries, count);
    expectPlaces(list.subarray(0, count), elementCount(shape));
    if (count > 0) loadAddon().writeEntries(stream.native, table, list);
  });
}

/** Lists may be long, and iterators are slow. One that ascends is checked by a look at each; of another one the places are marked. */
function expectPlaces(at: Int32Array, count: number): void {
  const { length } = at;
  let [former, least, most, ascends] = [-1, count, -1, true];
  for (let index = 0; index < length; index++) {
    const place = at[index] ?? 0;
    if (place <= former) ascends = false;
    if (place < least) least = place;
    if (place > most) most = place;
    former = place;
  }
  if (least < 0 || most >= count) refuse(least < 0 ? least : most, `whole numbers from 0 to ${count - 1}`);
  if (ascends) return;
  const named = new Uint8Array(most - least + 1);
  for (let index = 0; index < length; index++) {
    const place = at[index] ?? 0;
    if (named[place - least] === 1) refuse(place, 'a list that names no entry twice');
    named[place - least] = 1;
  }
}

function refuse(given: number, wanted: string): never {
  throw new InvalidValueError(`${name}: at has ${given}; it must be ${wanted}.`, { subject: 'at', given, wanted });
}
