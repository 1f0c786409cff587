import { InvalidValueError, type Stream } from '@kv/sparse-core';
import {
  blockEntry,
  type BlockKind,
  expectIndices,
  expectObject,
  listOf,
  loadAddon,
  mostBlocks,
  operation,
  show,
} from '@kv/sparse-core/native';
import type { Blocks24 } from '../blocks-24.js';
import { tableRule } from './block-arguments.js';

/** Which blocks of a pool were copied onto which. */
export interface BlockCopies {
  /** None twice. */
  readonly from: ArrayLike<number>;
  readonly to: ArrayLike<number>;
}

export interface CopyIndexMapArguments {
  /** Of one shape. */
  readonly keys: Blocks24['table'];
  readonly values: Blocks24['table'];
  readonly fromSlot: number;
  readonly toSlot: number;
  readonly dense: BlockCopies;
  readonly sparse: BlockCopies;
}

const enqueue = operation('copyIndexMap', [tableRule('keys'), tableRule('values')], ['keys', 'values']);

/**
 * Makes a slot's part of the index maps that of another slot, or of itself, but for blocks that were copied: where one
 * has a block of `from`, the other has the block of `to`. Which block of the sequence is where, and which is sparse, the
 * host need not know.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError for slots that do not exist, lists of different lengths, blocks that are no whole number,
 *   or a block of `from` that appears twice
 */
export function copyIndexMap(stream: Stream, args: CopyIndexMapArguments): void {
  enqueue(stream, args, ([keys, values], [{ shape }]) => {
    const { fromSlot, toSlot } = args;
    const [slots] = shape;
    for (const [subject, given] of Object.entries({ fromSlot, toSlot })) {
      if (Number.isInteger(given) && given >= 0 && given < slots) continue;
      throw new InvalidValueError(`copyIndexMap: ${subject} is ${show(given)}; the table has ${slots} slots.`, {
        subject,
        given,
        wanted: slots,
      });
    }
    const entries = [
      ...entriesOf('dense', args.dense, 'dense'),
      ...entriesOf('sparse', args.sparse, 'sparse24'),
    ].sort(([one], [other]) => one - other);
    const twice = entries.find(([from], index) => index > 0 && entries[index - 1]?.[0] === from);
    if (twice !== undefined) {
      throw new InvalidValueError(`copyIndexMap: the block of entry ${twice[0]} is copied twice; name it once.`, {
        subject: 'from',
        given: twice[0],
      });
    }
    const ends = [0, 1].flatMap((end) => entries.map((entry) => entry[end] ?? NaN));
    using copies = stream.device.tensor('i32', ['end', 'copy'], [2, entries.length], Int32Array.from(ends));
    loadAddon().copyIndexMap(stream.native, keys, values, fromSlot, toSlot, copies.native);
  });
}

const mostCopies = 2 ** 24; // more than pools have blocks

/** What an index map says of each block of a kind, and of its copy. */
function entriesOf(name: string, copies: BlockCopies, kind: BlockKind): [number, number][] {
  expectObject('copyIndexMap', name, copies);
  const from = listOf('copyIndexMap', `${name}.from`, copies.from, mostCopies);
  const to = listOf('copyIndexMap', `${name}.to`, copies.to, mostCopies);
  if (from.length !== to.length) {
    throw new InvalidValueError(
      `copyIndexMap: ${from.length} ${name} blocks were copied to ${to.length}; pair them up.`,
      { subject: name, given: to.length, wanted: from.length },
    );
  }
  expectIndices('copyIndexMap', `${name}.from`, from, mostBlocks(kind));
  expectIndices('copyIndexMap', `${name}.to`, to, mostBlocks(kind));
  return from.map((block, index) => [blockEntry(kind, block), blockEntry(kind, to[index] ?? NaN)]);
}
