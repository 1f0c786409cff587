import { InvalidValueError } from '../errors.js';
import { expectStream } from '../expect-stream.js';
import type { Device, Stream, TensorHandle } from '../handles.js';
import { madeTogether } from '../made-together.js';
import { expectIndices, expectObject, expectThat, listOf } from '../validate.js';

/** One sequence's part of a batch. */
export interface RowBatchEntry {
  /** Where the sequence's cache is. */
  readonly slot: number;
  /** Position of its first row in the sequence. */
  readonly position: number;
  /** How many rows (tokens) it contributes. */
  readonly rows: number;
}

/**
 * The rows of one step, packed: entry `b` owns rows `queryStart[b] .. queryStart[b + 1] - 1` of every
 * `[token, …]` tensor. Made once for a step and shared by all layers.
 *
 * The tensors of a recorded step may name more slots than there are `entries`, and have more rows than these own. The
 * other slots then have no rows, `queryStart` is level there, and what an operation reads or writes for them is nothing.
 */
export interface RowBatch extends Disposable {
  readonly entries: readonly RowBatchEntry[];
  /** Of every `[token, …]` tensor. */
  readonly rows: number;
  /** i32 `[batch]`, none twice. */
  readonly slots: TensorHandle<'i32', readonly ['batch']>;
  /** i32 `[batch + 1]`, ascending from 0 to the number of rows that entries own. */
  readonly queryStart: TensorHandle<'i32', readonly ['boundary']>;
  /** i32 `[token]`: the position of each row in its own sequence. */
  readonly positions: TensorHandle<'i32', readonly ['token']>;
  dispose(): void;
}

/** Of one step: far more than a device computes at once. */
const mostRows = 2 ** 24;
const mostIndex = 2 ** 31 - 1;

/** Lists that were checked, and cannot have changed since: each layer gets the batch of a step. */
const checkedLists = new WeakSet<readonly RowBatchEntry[]>();

/** A copy that stays as it was checked. */
function checkedEntries(operation: string, given: readonly RowBatchEntry[]): readonly RowBatchEntry[] {
  if (checkedLists.has(given)) return given;
  const entries = Object.freeze(listOf(operation, 'entries', given, mostRows).map((entry) => checkedEntry(operation, entry)));
  if (new Set(entries.map((entry) => entry.slot)).size !== entries.length) {
    throw new InvalidValueError(`${operation}: a slot appears twice in one batch; give each sequence one entry.`, {
      subject: 'entries',
      given: entries.map((entry) => entry.slot),
    });
  }
  checkedLists.add(entries);
  return entries;
}

function checkedEntry(operation: string, entry: RowBatchEntry): RowBatchEntry {
  expectObject(operation, 'entries', entry);
  const { slot, position, rows } = entry;
  expectIndices(operation, 'slot', [slot], mostIndex + 1);
  expectIndices(operation, 'position', [position], mostIndex + 1);
  expectThat(operation, 'rows', rows, Number.isInteger(rows) && rows > 0, 'a whole number from 1 on');
  return Object.freeze({ slot, position, rows });
}

/**
 * The entries of a batch, of `createRowBatch` or of whoever records steps.
 * @throws InvalidValueError
 */
export function entriesOf(operation: string, batch: Pick<RowBatch, 'entries'>): readonly RowBatchEntry[] {
  expectObject(operation, 'batch', batch);
  return checkedEntries(operation, batch.entries);
}

/** What a store's method is given of a batch. @throws InvalidValueError unless that is there */
export function checkedCall<Call extends { readonly batch: RowBatch }>(operation: string, call: Call): Call {
  expectObject(operation, 'call', call);
  entriesOf(operation, call.batch);
  return call;
}

/**
 * Puts a step's bookkeeping on the device.
 * @throws InvalidValueError when there is no row, or a slot appears twice; OutOfMemoryError
 */
export function createRowBatch(device: Device, stream: Stream, given: readonly RowBatchEntry[]): RowBatch {
  expectStream('createRowBatch', stream);
  expectThat('createRowBatch', 'device', device, (stream).device === device, 'the device of the stream');
  const entries = checkedEntries('createRowBatch', given);
  const rows = entries.reduce((sum, entry) => sum + entry.rows, 0);
  expectThat('createRowBatch', 'the sum of rows', rows, rows > 0 && rows <= mostRows, `from 1 to ${mostRows}`);
  const queryStart = new Int32Array(entries.length + 1);
  const positions = new Int32Array(rows);
  entries.forEach((entry, index) => {
    const start = queryStart[index] ?? 0;
    queryStart[index + 1] = start + entry.rows;
    for (let row = 0; row < entry.rows; row++) positions[start + row] = entry.position + row;
  });
  const tensors = madeTogether((own) => ({
    slots: own(device.tensor('i32', ['batch'], [entries.length], Int32Array.from(entries, (entry) => entry.slot))),
    queryStart: own(device.tensor('i32', ['boundary'], [entries.length + 1], queryStart)),
    positions: own(device.tensor('i32', ['token'], [rows], positions)),
  }));
  const dispose = () => {
    for (const tensor of Object.values(tensors)) tensor.dispose();
  };
  return {
    entries,
    rows,
    ...tensors,
    dispose,
    [Symbol.dispose]: dispose,
  };
}
