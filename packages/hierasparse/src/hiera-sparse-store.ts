import { InvalidValueError, type KvLayer, type KvStoreFactory, ShapeError } from '@kv/sparse-core';
import { type BlockSparsity, nameOf, sharesOf } from './block-sparsity.js';
import { ElementMask } from './element-mask.js';
import { blockTokens, type KvOperand, type SparseDType } from './mixed-blocks.js';
import { expectHeadDim } from './operations/block-arguments.js';
import { HieraSparseStore } from './store/hiera-sparse-store.js';
import { MixedBlockPools } from './store/mixed-block-pools.js';

export interface HieraSparseOptions extends BlockSparsity {
  /** First tokens that stay dense, rounded up to whole blocks. Default: 64. */
  readonly sinkTokens?: number;
  /** Last tokens that stay dense. Default: 256. */
  readonly localWindow?: number;
  /** Element type of the cache. Default: that of the rows if it has 16 bits, else f16. */
  readonly dtype?: SparseDType;
  /**
   * Which elements sparse blocks keep, `[kvHead, blockToken, dim]`, not zero where one is kept; at most two of four
   * neighbours. Default: of four the two of largest magnitude.
   */
  readonly elementMask?: (layer: KvLayer, operand: KvOperand) => Uint8Array | undefined;
}

/**
 * Keys and values in dense and 2:4 sparse blocks of one set of pools that all layers share (HieraSparse, section
 * III-B). When a prompt is complete, the blocks that lose the least become sparse, up to these shares of those
 * between sinks and local window, of keys and values and in every kv head by itself. Answers are appended dense.
 * @throws InvalidValueError when a share is not between 0 and 1, or a count of tokens is negative
 */
export function hieraSparseStore(options: HieraSparseOptions = {}): KvStoreFactory {
  const { sinkTokens = 64, localWindow = 256, dtype, elementMask } = options;
  for (const [subject, given] of Object.entries({ sinkTokens, localWindow })) {
    if (Number.isInteger(given) && given >= 0) continue;
    throw new InvalidValueError(`${subject} is ${given}; it must be a whole number of tokens, 0 or more.`, {
      subject,
      given,
    });
  }
  sharesOf(options, 0);
  const name = nameOf(options);
  return {
    name,
    create(layers, capacity) {
      const [first] = layers;
      if (first === undefined) return [];
      expectOneHeadDim(layers);
      const { device, slots, tokens, rowDType } = capacity;
      // Every sequence may leave one block of each head partly filled.
      const runs = Math.ceil(tokens / blockTokens) + slots;
      const shares = layers.map(({ index }) => sharesOf(options, index));
      // Every sequence may round half a block of each head up.
      const mostSparse = (share: number) =>
        share === 0 ? 0 : Math.min(runs, Math.ceil(share * runs + slots / 2));
      const sparseBlocks = (operand: KvOperand) =>
        layers.reduce(
          (sum, { kvHeads }, index) => sum + kvHeads * mostSparse(shares[index]?.[operand] ?? 0),
          0,
        );
      const pools = new MixedBlockPools({
        device,
        dtype: dtype ?? (rowDType === 'bf16' ? 'bf16' : 'f16'),
        headDim: first.headDim,
        denseBlocks: runs * layers.reduce((sum, { kvHeads }) => sum + kvHeads, 0),
        sparseBlocks: { keys: sparseBlocks('keys'), values: sparseBlocks('values') },
      });
      let open = layers.length;
      const close = () => {
        if (--open === 0) pools.dispose();
      };
      const undo = [() => pools.dispose()];
      try {
        return layers.map((layer, index) => {
          const mask = (operand: KvOperand) => {
            const kept = elementMask?.(layer, operand);
            if (kept === undefined) return undefined;
            expectWholeHeads(layer, kept);
            const made = new ElementMask(device, operand, layer.headDim, kept);
            undo.push(() => made.dispose());
            return { [operand]: made };
          };
          const store = new HieraSparseStore({
            name,
            layer,
            capacity,
            pools,
            shares: shares[index] ?? { keys: 0, values: 0 },
            sinkBlocks: Math.ceil(sinkTokens / blockTokens),
            localWindow,
            masks: { ...mask('keys'), ...mask('values') },
            close,
          });
          undo.push(() => store.dispose());
          return store;
        });
      } catch (error) {
        for (const each of undo.reverse()) each();
        throw error;
      }
    },
  };
}

/** @throws CapabilityError, ShapeError */
function expectOneHeadDim(layers: readonly KvLayer[]): void {
  const headDims = layers.map((layer) => layer.headDim);
  const [first = 0] = headDims;
  expectHeadDim('hieraSparseStore', first);
  if (headDims.every((headDim) => headDim === first)) return;
  throw new ShapeError('The layers of one cache must have the same headDim.', {
    subject: 'headDim',
    given: headDims,
  });
}

/** @throws ShapeError */
function expectWholeHeads({ index, kvHeads, headDim }: KvLayer, kept: Uint8Array): void {
  const wanted = kvHeads * blockTokens * headDim;
  if (kept.length === wanted) return;
  throw new ShapeError(
    `The element mask of layer ${index} has ${kept.length} elements; ${kvHeads} kv heads of ${blockTokens} tokens and ` +
      `${headDim} dims have ${wanted}.`,
    { subject: 'elementMask', given: kept.length, wanted },
  );
}
