import { InvalidValueError, ShapeError, type Stream } from '@kv/sparse-core';
import { expectIndices, expectObject, expectThat, listOf, loadAddon, operation, show } from '@kv/sparse-core/native';
import { ElementMask } from '../element-mask.js';
import { type BlockLoss, blockTokens, type KvOperand, type Blocks24 } from '../blocks-24.js';
import { denseRule, expectOperand, expectSparseBlocks, sparseRules, tableRule } from './block-arguments.js';

/** How many blocks of one kv head of one slot become sparse, and where they go. */
export interface Pruning {
  readonly slot: number;
  readonly kvHead: number;
  /** Where the range of blocks of the sequence begins, of which those that are dense may become sparse. */
  readonly firstBlock: number;
  /** The block behind the last of the range. */
  readonly endBlock: number;
  /** Free blocks of the sparse pool, as many as become sparse; taken in ascending order of the blocks. */
  readonly sparseIds: ArrayLike<number>;
  /** The range's dense blocks of the pool from this one on become free; as many as become sparse. */
  readonly freedFrom: number;
}

export interface Compress24Arguments {
  readonly operand: KvOperand;
  readonly blocks: Blocks24;
  /** A kv head of a slot at most once. */
  readonly prunings: readonly Pruning[];
  /** Default: of four neighbours the two of largest magnitude, of equal ones the first. */
  readonly elementMask?: ElementMask | undefined;
  /** Of the shape of the table, contiguous. Default: the sums of the magnitudes of what is not kept. */
  readonly blockLoss?: BlockLoss | undefined;
}

const enqueue = operation(
  'compress24',
  [
    denseRule('blocks.dense'),
    ...sparseRules('blocks.sparse', 'blocks.dense'),
    tableRule('blocks.table'),
    { name: 'elementMask.kept', dtype: ['u8'], shape: ['kvHead', blockTokens, 'dim'], layout: 'contiguous', optional: true },
    { name: 'blockLoss', dtype: ['f32'], shape: ['slot', 'kvHead', 'tableBlock'], layout: 'contiguous', optional: true },
  ],
  ['blocks.dense', 'blocks.sparse.nonZeros', 'blocks.sparse.metadata', 'blocks.table'],
);

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
export function compress24(stream: Stream, args: Compress24Arguments): void {
  enqueue(stream, args, ([dense, nonZeros, metadata, table, mask, loss], tensors) => {
    const [denseTensor, nonZerosTensor, metadataTensor, { shape }] = tensors;
    const { operand, elementMask } = args;
    expectOperand('compress24', operand);
    expectSparseBlocks('compress24', denseTensor, nonZerosTensor, metadataTensor);
    if (elementMask !== undefined) expectMask(elementMask, operand);
    const [slots, kvHeads, width] = shape;
    const extents = { slots, kvHeads, width, blocks: denseTensor.shape[0], sparseBlocks: nonZerosTensor.shape[0] };
    const prunings = listOf('compress24', 'prunings', args.prunings, slots * kvHeads).map((given) => packed(given, extents));
    if (prunings.length === 0) return;
    expectDistinct('prunings', 'a kv head of a slot', prunings.map(({ row }) => row));
    const ids = prunings.flatMap(({ sparseIds }) => sparseIds);
    expectDistinct('sparseIds', 'a sparse block', ids);
    let firstId = 0;
    const words = prunings.flatMap(({ row, firstBlock, endBlock, sparseIds, freedFrom }) => {
      const start = firstId;
      firstId += sparseIds.length;
      return [row, firstBlock, endBlock, sparseIds.length, start, freedFrom];
    });
    const { device } = stream;
    using pruningTensor = device.tensor('i32', ['pruning', 'field'], [prunings.length, 6], Int32Array.from(words));
    using idTensor = device.tensor('i32', ['id'], [ids.length], Int32Array.from(ids));
    const mostBlocks = prunings.reduce((most, { firstBlock, endBlock }) => Math.max(most, endBlock - firstBlock), 0);
    loadAddon().compress24(
      stream.native,
      operand === 'values',
      dense,
      nonZeros,
      metadata,
      table,
      pruningTensor.native,
      idTensor.native,
      mostBlocks,
      mask,
      loss,
    );
  });
}

/** @throws InvalidValueError unless each number is there once */
function expectDistinct(subject: string, what: string, given: readonly number[]): void {
  if (new Set(given).size === given.length) return;
  throw new InvalidValueError(`compress24: ${what} is given twice; name it once.`, { subject, given });
}

function expectMask(mask: ElementMask, operand: KvOperand): void {
  const made = ElementMask.is(mask);
  expectThat('compress24', 'elementMask', mask, made, 'an ElementMask; make one, which checks that it is 2:4');
  if (mask.operand === operand) return;
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
  /** Blocks of the sparse pool. */
  readonly sparseBlocks: number;
}

/** A pruning that is checked, copied, and knows its row of the table. */
function packed(pruning: Pruning, { slots, kvHeads, width, blocks, sparseBlocks }: Extents) {
  expectObject('compress24', 'prunings', pruning);
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
      `compress24: the pruning ${show(pruning)} was given; the table has ${slots} slots of ${kvHeads} kv heads and ` +
        `${width} blocks, the pool ${blocks}.`,
      { subject: 'prunings', given: pruning, wanted: { slots, kvHeads, width, blocks } },
    );
  }
  const sparseIds = listOf('compress24', 'sparseIds', pruning.sparseIds, sparseBlocks);
  expectIndices('compress24', 'sparseIds', sparseIds, sparseBlocks);
  return { row: slot * kvHeads + kvHead, firstBlock, endBlock, sparseIds, freedFrom };
}
