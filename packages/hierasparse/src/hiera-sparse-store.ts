import {
  CapabilityError,
  DTypeError,
  InvalidValueError,
  type KvCapacity,
  type KvLayer,
  type KvStoreFactory,
  ShapeError,
} from '@kv/sparse-core';
import { expectCapacity, expectContiguous, expectDType, expectOptions, expectShape, expectThat, nativeOf, show } from '@kv/sparse-core/native';
import { allDense, type BlockSparsity, nameOf, type Shares, sharesOf, sparsityOptions } from './block-sparsity.js';
import { ElementMask } from './element-mask.js';
import { type BlockLoss, blockTokens, type KvOperand, operands, type SparseDType, sparseDTypes } from './blocks-24.js';
import { expectHeadDim } from './operations/block-arguments.js';
import { promptSparsity } from './sparse-prompts.js';
import { BlockStore24 } from './store/block-store-24.js';
import { BlockPools24 } from './store/block-pools-24.js';
import { poolSizes } from './store/pool-sizes.js';

export interface HieraSparseOptions extends BlockSparsity {
  /** First tokens that stay dense, rounded up to whole blocks. Default: 64. */
  readonly sinkTokens?: number | undefined;
  /** Last tokens that stay dense. Default: 256. */
  readonly localWindow?: number | undefined;
  /** Element type of the cache. Default: that of the rows if it has 16 bits, else f16. */
  readonly dtype?: SparseDType | undefined;
  /**
   * Which elements sparse blocks keep, `[kvHead, blockToken, dim]`, not zero where one is kept; at most two of four
   * neighbours. Default: of four the two of largest magnitude.
   */
  readonly elementMask?: ((layer: KvLayer, operand: KvOperand) => Uint8Array | undefined) | undefined;
  /**
   * Which blocks become sparse: those of least loss, with a loss for each block of 64 of `tokensPerSlot`. Read in stream
   * order whenever blocks become sparse, so that it may change in between; yours to dispose, after the store. A fork goes
   * by the losses of its own slot; after a selector, blocks are counted in what it kept. Default: the sums of the
   * magnitudes of what is not kept.
   */
  readonly blockLoss?: ((layer: KvLayer, operand: KvOperand, capacity: KvCapacity) => BlockLoss | undefined) | undefined;
}

/**
 * Keys and values in dense and 2:4 sparse blocks of one set of pools that all layers share (HieraSparse, section
 * III-B). When a prompt is complete, the blocks that lose the least become sparse, up to these shares of those
 * between sinks and local window, of keys and values and in every kv head by itself. Of the answer those that leave the
 * local window are candidates too. Pools are of the sizes that the cache may come to need: with a `hieraSparsePrefill`
 * in the capacity, little more than the compressed bytes.
 * @throws InvalidValueError when a share is not between 0 and 1, or a count of tokens is negative
 * @throws DTypeError when sparse blocks cannot be of the dtype
 */
export function hieraSparseStore(options: HieraSparseOptions = {}): KvStoreFactory {
  expectOptions('hieraSparseStore', options, {
    ...{ ...sparsityOptions, sinkTokens: true, localWindow: true },
    ...{ dtype: true, elementMask: true, blockLoss: true },
  });
  sharesOf(options, 0);
  const { sinkTokens = 64, localWindow = 256, dtype, elementMask, blockLoss } = options;
  for (const [subject, given] of Object.entries({ sinkTokens, localWindow })) {
    if (Number.isSafeInteger(given) && given >= 0) continue;
    throw new InvalidValueError(`${subject} is ${show(given)}; it must be a whole number of tokens, 0 or more.`, {
      subject,
      given,
    });
  }
  if (dtype !== undefined && !sparseDTypes.includes(dtype)) {
    throw new DTypeError(
      `hieraSparseStore: dtype is ${show(dtype)}; blocks can be made sparse in ${sparseDTypes.join(' or ')}. ` +
        'Use densePagedStore() for a cache of other elements.',
      { subject: 'dtype', given: dtype, wanted: sparseDTypes },
    );
  }
  for (const [subject, given] of Object.entries({ elementMask, blockLoss })) {
    expectThat('hieraSparseStore', subject, given, given === undefined || typeof given === 'function', 'a function');
  }
  const name = nameOf(options);
  return {
    name,
    create(layers, capacity) {
      const [first] = layers;
      if (first === undefined) return [];
      expectCapacity(layers, capacity);
      expectHeadDim('hieraSparseStore', first.headDim);
      const { device, rowDType, prefill } = capacity;
      const sparsity = (prefill && promptSparsity.of(prefill)) ?? {};
      const rules = layers.map(({ index, kvHeads }) => {
        const [prompt, after] = [sharesOf(sparsity, index), sharesOf(options, index)];
        expectMoreAfter(index, prompt, after);
        return { kvHeads, prompt, after };
      });
      const sinkBlocks = Math.ceil(sinkTokens / blockTokens);
      const pools = new BlockPools24({
        device,
        dtype: dtype ?? (rowDType === 'bf16' ? 'bf16' : 'f16'),
        headDim: first.headDim,
        sizes: poolSizes(rules, capacity, { sinkBlocks, localWindow }),
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
            const made = new ElementMask(device, operand, layer.headDim, kept);
            undo.push(() => made.dispose());
            expectAllHeads(layer, made);
            return { [operand]: made };
          };
          const loss = (operand: KvOperand) => {
            const given = blockLoss?.(layer, operand, capacity);
            if (given === undefined) return undefined;
            expectBlockLoss(given, layer, capacity);
            return { [operand]: given };
          };
          const store = new BlockStore24({
            name,
            layer,
            capacity,
            pools,
            poolBytes: pools.bytes / layers.length,
            prompt: rules[index]?.prompt ?? allDense,
            after: rules[index]?.after ?? allDense,
            sinkBlocks,
            localWindow,
            masks: { ...mask('keys'), ...mask('values') },
            losses: { ...loss('keys'), ...loss('values') },
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

/** @throws CapabilityError when more of a prompt would be sparse than after it */
function expectMoreAfter(layer: number, prompt: Shares, after: Shares): void {
  for (const operand of operands) {
    if (prompt[operand] <= after[operand]) continue;
    throw new CapabilityError(
      `${prompt[operand]} of the ${operand} would be sparse in the prompt and ${after[operand]} after it in layer ${layer}; ` +
        'blocks do not become dense again. Give the store at least the sparsity of the prefill attention.',
      { subject: operand, given: prompt[operand], wanted: after[operand] },
    );
  }
}

/** @throws ShapeError */
function expectAllHeads({ index, kvHeads }: KvLayer, { kept }: ElementMask): void {
  const [given] = kept.shape;
  if (given === kvHeads) return;
  throw new ShapeError(`The element mask of layer ${index} is of ${given} kv heads; the layer has ${kvHeads}.`, {
    subject: 'elementMask',
    given,
    wanted: kvHeads,
  });
}

/** @throws ShapeError, DTypeError, DeviceError, DisposedError */
function expectBlockLoss(given: BlockLoss, { kvHeads }: KvLayer, { device, slots, tokensPerSlot }: KvCapacity): void {
  const shape = [slots, kvHeads, Math.ceil(tokensPerSlot / blockTokens)];
  nativeOf('hieraSparseStore', 'blockLoss', given, device.defaultStream);
  expectDType('hieraSparseStore', 'blockLoss', given, ['f32']);
  expectShape('hieraSparseStore', 'blockLoss', given, shape);
  expectContiguous('hieraSparseStore', 'blockLoss', given);
}
