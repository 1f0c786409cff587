import type { Stream } from '../stream.js';
import type { Device } from '../device.js';
import { InvalidValueError } from '../errors.js';
import { madeTogether } from '../made-together.js';
import type { TensorHandle } from '../tensor.js';

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
 */
export interface RowBatch extends Disposable {
  readonly entries: readonly RowBatchEntry[];
  readonly rows: number;
  /** i32 `[batch]` */
  readonly slots: TensorHandle<'i32', readonly ['batch']>;
  /** i32 `[batch + 1]`, ascending from 0 to `rows`. */
  readonly queryStart: TensorHandle<'i32', readonly ['boundary']>;
  /** i32 `[token]`: the position of each row in its own sequence. */
  readonly positions: TensorHandle<'i32', readonly ['token']>;
  dispose(): void;
}

/**
 * Puts a step's bookkeeping on the device.
 * @throws InvalidValueError when there is no row, or a slot appears twice; OutOfMemoryError
 */
export function createRowBatch(device: Device, stream: Stream, entries: readonly RowBatchEntry[]): RowBatch {
  const rows = entries.reduce((sum, entry) => sum + entry.rows, 0);
  if (rows === 0 || entries.some((entry) => entry.rows < 1)) {
    throw new InvalidValueError('A batch needs at least one row for each of its entries.', {
      subject: 'entries',
      given: entries,
    });
  }
  if (new Set(entries.map((entry) => entry.slot)).size !== entries.length) {
    throw new InvalidValueError('A slot appears twice in one batch; give each sequence one entry.', {
      subject: 'entries',
      given: entries.map((entry) => entry.slot),
    });
  }
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
