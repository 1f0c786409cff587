import { InvalidValueError, type Stream } from '@kv/sparse-core';
import { expectContiguous, expectDType, expectShape, loadAddon, nativeOf } from '@kv/sparse-core/native';
import { denseEntry, type MixedBlocks, sparseEntry } from '../mixed-blocks.js';

/** Which blocks of a pool were copied onto which. */
export interface BlockCopies {
  /** None twice. */
  readonly from: readonly number[];
  readonly to: readonly number[];
}

export interface CopyIndexMapArguments {
  readonly table: MixedBlocks['table'];
  readonly fromSlot: number;
  readonly toSlot: number;
  readonly dense: BlockCopies;
  readonly sparse: BlockCopies;
}

/**
 * Makes a slot's part of an index map that of another slot, but for the numbers of the blocks: where one has a block
 * of `from`, the other has the block of `to`, and where it has any other, none. Which block of the sequence is where,
 * and which is sparse, the host need not know.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError for slots that do not exist, lists of different lengths, blocks that are no whole number,
 *   or a block of `from` that appears twice
 */
export function copyIndexMap(stream: Stream, { table, fromSlot, toSlot, dense, sparse }: CopyIndexMapArguments): void {
  const native = nativeOf('copyIndexMap', 'table', table, stream);
  expectDType('copyIndexMap', 'table', table, ['i32']);
  expectShape('copyIndexMap', 'table', table, [undefined, undefined, undefined]);
  expectContiguous('copyIndexMap', 'table', table);
  const [slots] = table.shape;
  for (const [subject, given] of Object.entries({ fromSlot, toSlot })) {
    if (Number.isInteger(given) && given >= 0 && given < slots) continue;
    throw new InvalidValueError(`copyIndexMap: ${subject} is ${given}; the table has ${slots} slots.`, {
      subject,
      given,
      wanted: slots,
    });
  }
  const entries = [
    ...entriesOf('dense', dense, denseEntry),
    ...entriesOf('sparse', sparse, sparseEntry),
  ].sort(([one], [other]) => one - other);
  const twice = entries.find(([from], index) => index > 0 && entries[index - 1]?.[0] === from);
  if (twice !== undefined) {
    throw new InvalidValueError(`copyIndexMap: the block of entry ${twice[0]} is copied twice; name it once.`, {
      subject: 'from',
      given: twice[0],
    });
  }
  const list = (which: 0 | 1) =>
    stream.device.tensor('i32', ['copy'], [entries.length], Int32Array.from(entries, (entry) => entry[which]));
  using from = list(0);
  using to = list(1);
  const rowOf = (slot: number) => nativeOf('copyIndexMap', 'table', table.slice('slot', slot, slot + 1), stream).native;
  loadAddon().copyIndexMap(stream.native, rowOf(fromSlot), rowOf(toSlot), from.native, to.native);
  native.writtenBy(stream);
}

const mostBlocks = 2 ** 31 - 1; // that an entry of 32 bits can name

/** What an index map says of each block of a kind, and of its copy. */
function entriesOf(kind: string, { from, to }: BlockCopies, entryOf: (block: number) => number): [number, number][] {
  if (from.length !== to.length) {
    throw new InvalidValueError(
      `copyIndexMap: ${from.length} ${kind} blocks were copied to ${to.length}; pair them up.`,
      { subject: kind, given: to.length, wanted: from.length },
    );
  }
  const wrong = [...from, ...to].find((block) => !Number.isInteger(block) || block < 0 || block >= mostBlocks);
  if (wrong !== undefined) {
    throw new InvalidValueError(`copyIndexMap: ${wrong} is no number of a ${kind} block.`, { subject: kind, given: wrong });
  }
  return from.map((block, index) => [entryOf(block), entryOf(to[index] ?? NaN)]);
}
