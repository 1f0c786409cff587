import { InvalidValueError, ShapeError, type Stream } from '@kv/sparse-core';
import { expectContiguous, expectDType, expectShape, loadAddon, nativeOf, type NativeTensor } from '@kv/sparse-core/native';
import { ElementMask } from '../element-mask.js';
import type { BlockLoss, KvOperand, MixedBlocks } from '../mixed-blocks.js';
import { expectOperand, expectSparseIds, nativeBlockLoss, nativeDense, nativeSparse } from './block-arguments.js';

/** How many blocks of one kv head of one slot become sparse, and where they go. */
export interface Pruning {
  readonly slot: number;
  readonly kvHead: number;
  /** The range of blocks of the sequence, of which those that are dense may become sparse. */
  readonly firstBlock: number;
  readonly endBlock: number;
  /** Free blocks of the sparse pool, as many as become sparse; taken in ascending order of the blocks. */
  readonly sparseIds: readonly number[];
  /** The range's dense blocks of the pool from this one on become free; as many as become sparse. */
  readonly freedFrom: number;
}

export interface Compress24Arguments {
  readonly operand: KvOperand;
  readonly blocks: MixedBlocks;
  /** A kv head of a slot at most once. */
  readonly prunings: readonly Pruning[];
  /** Default: of four neighbours the two of largest magnitude, of equal ones the first. */
  readonly elementMask?: ElementMask | undefined;
  /** Of the shape of the table, contiguous. Default: the sums of the magnitudes of what is not kept. */
  readonly blockLoss?: BlockLoss | undefined;
}

/**
 * Makes blocks sparse (HieraSparse, equations 2a to 2d): of each range the blocks that lose the least, and of equal
 * ones the first. Which they are is decided on the device; where they go, and which dense blocks of the pool become
 * free, the caller decides, and so knows without waiting. Dense blocks that stay move, if they must, into places that
 * became vacant, and the table says where everything is.
 *
 * Magnitudes compare by their bits: NaN is largest, then infinity. A block with a NaN or infinity that would not be
 * kept comes last.
 * @throws CapabilityError, ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError; more blocks than a
 * range has dense ones, or than `freedFrom` frees, reject the stream's next wait with an InvalidValueError, and blocks
 * or masks that begin inside 16 bytes with a CapabilityError
 */
export function compress24(stream: Stream, options: Compress24Arguments): void {
  const { operand, blocks, prunings, elementMask, blockLoss } = options;
  const { dense, sparse, table } = blocks;
  expectOperand('compress24', operand);
  const nativeBlocks = nativeDense('compress24', 'dense', dense, stream);
  const [nonZeros, metadata] = nativeSparse('compress24', sparse, dense, stream);
  const nativeTable = nativeOf('compress24', 'table', table, stream);
  expectDType('compress24', 'table', table, ['i32']);
  expectShape('compress24', 'table', table, [undefined, undefined, undefined]);
  expectContiguous('compress24', 'table', table);
  const nativeMask = elementMask && nativeElementMask(elementMask, operand, blocks, stream);
  const nativeLoss = blockLoss && nativeBlockLoss('compress24', blockLoss, table.shape, stream);
  if (prunings.length === 0) return;
  const [slots, kvHeads, width] = table.shape;
  const rows = prunings.map((pruning) => expectRow(pruning, { slots, kvHeads, width, blocks: dense.shape[0] }));
  if (new Set(rows).size !== rows.length) {
    throw new InvalidValueError('compress24: a kv head of a slot appears twice; give it one pruning.', {
      subject: 'prunings',
      given: rows,
    });
  }
  const ids = prunings.flatMap(({ sparseIds }) => sparseIds);
  expectSparseIds('compress24', ids, sparse);
  if (new Set(ids).size !== ids.length) {
    throw new InvalidValueError('compress24: a sparse block is given twice; it can hold one block.', {
      subject: 'sparseIds',
      given: ids,
    });
  }
  let firstId = 0;
  const words = prunings.flatMap(({ firstBlock, endBlock, sparseIds, freedFrom }, index) => {
    const start = firstId;
    firstId += sparseIds.length;
    return [rows[index] ?? 0, firstBlock, endBlock, sparseIds.length, start, freedFrom];
  });
  const { device } = stream;
  using nativePrunings = device.tensor('i32', ['pruning', 'field'], [prunings.length, 6], Int32Array.from(words));
  using nativeIds = device.tensor('i32', ['id'], [ids.length], Int32Array.from(ids));
  const mostBlocks = prunings.reduce((most, { firstBlock, endBlock }) => Math.max(most, endBlock - firstBlock), 0);
  loadAddon().compress24(
    stream.native,
    operand === 'values',
    nativeBlocks,
    nonZeros,
    metadata,
    nativeTable.native,
    nativePrunings.native,
    nativeIds.native,
    mostBlocks,
    nativeMask,
    nativeLoss,
  );
  for (const tensor of [dense, sparse.nonZeros, sparse.metadata, table]) {
    nativeOf('compress24', 'blocks', tensor, stream).writtenBy(stream);
  }
}

function nativeElementMask(
  mask: ElementMask,
  operand: KvOperand,
  { dense, table }: MixedBlocks,
  stream: Stream,
): NativeTensor {
  if (!((mask as unknown) instanceof ElementMask)) {
    throw new InvalidValueError('compress24: elementMask is not an ElementMask; make one, which checks that it is 2:4.', {
      subject: 'elementMask',
      given: mask,
      wanted: 'ElementMask',
    });
  }
  const { native } = nativeOf('compress24', 'elementMask', mask.kept, stream);
  expectShape('compress24', 'elementMask', mask.kept, [table.shape[1], ...dense.shape.slice(1)]);
  if (mask.operand === operand) return native;
  throw new ShapeError(`compress24: the element mask is of ${mask.operand} and the blocks hold ${operand}.`, {
    subject: 'elementMask',
    given: mask.operand,
    wanted: operand,
  });
}

/** What a pruning must lie in. */
interface Extents {
  readonly slots: number;
  readonly kvHeads: number;
  /** Blocks of a sequence. */
  readonly width: number;
  /** Dense blocks of the pool. */
  readonly blocks: number;
}

/** The row of the table that a pruning is about. */
function expectRow(pruning: Pruning, { slots, kvHeads, width, blocks }: Extents): number {
  const { slot, kvHead, firstBlock, endBlock, freedFrom } = pruning;
  const inside = (value: number, lowest: number, highest: number) =>
    Number.isInteger(value) && value >= lowest && value <= highest;
  const fits =
    inside(slot, 0, slots - 1) &&
    inside(kvHead, 0, kvHeads - 1) &&
    inside(firstBlock, 0, width) &&
    inside(endBlock, firstBlock, width) &&
    inside(freedFrom, 0, blocks);
  if (!fits) {
    throw new InvalidValueError(
      `compress24: blocks ${firstBlock} to ${endBlock} of slot ${slot}, kv head ${kvHead} were given, those of the pool ` +
        `from ${freedFrom} on to become free; the table has ${slots} slots of ${kvHeads} kv heads and ${width} blocks, ` +
        `the pool ${blocks}.`,
      { subject: 'prunings', given: pruning, wanted: { slots, kvHeads, width, blocks } },
    );
  }
  return slot * kvHeads + kvHead;
}
