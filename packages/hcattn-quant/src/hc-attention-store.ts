import { CapabilityError, type FloatDType, InvalidValueError, type KvCapacity, type KvStoreFactory } from '@kv/sparse-core';
import { densePagedStores, expectCapacity, expectObject, expectThat, floats, show } from '@kv/sparse-core/native';
import { blockTokens, type CodeBits } from './quantized-blocks.js';
import { quantizesPrompts } from './quantized-prompts.js';
import { AttentionScratch } from './store/attention-scratch.js';
import { QuantizedPools } from './store/quantized-pools.js';
import { QuantizedStore } from './store/quantized-store.js';

/** How keys or values are held: in codes of 8 or 4 bits, with a scale of one byte for each 32. */
export type Codec = 'int8' | 'int4';

const bitsOf: Readonly<Record<Codec, CodeBits>> = { int8: 8, int4: 4 };
const codecs = Object.keys(bitsOf).join(' or ');

export interface HcAttentionOptions {
  readonly keys: Codec;
  readonly values: Codec;
  /** Where values are: with the keys, on the device. */
  readonly valuesOn: 'device';
  /** First tokens that stay dense, rounded up to whole blocks of 64. Default: 0. */
  readonly sinkTokens?: number | undefined;
  /** Last tokens that stay dense, beside those of a block that is not full. Default: 64. */
  readonly localWindow?: number | undefined;
  /** Element type of what stays dense. Default: that of the rows if it has 16 bits, else f16. */
  readonly dtype?: FloatDType | undefined;
}

/** Which tokens stay dense. */
interface DenseTokens {
  readonly sinkBlocks: number;
  readonly localWindow: number;
}

/**
 * Keys and values as codes in blocks of 64 tokens of one kv head, on the device. The first tokens, the last ones and the
 * block that fills are dense. With `hcAttentionPrefill()` in the capacity a prompt is quantized while it is read, and
 * pools are of the size of the codes; with any other it is quantized when it is complete, after a selection.
 *
 * Cutting a sequence inside of a quantized block makes what is left of that block dense again.
 * @throws InvalidValueError when a codec or a count of tokens is none
 * @throws CapabilityError when values are to be elsewhere
 */
export function hcAttentionStore(options: HcAttentionOptions): KvStoreFactory {
  expectObject('hcAttentionStore', 'options', options);
  const { keys, values, valuesOn, sinkTokens = 0, localWindow = 64, dtype } = options;
  for (const [subject, given] of Object.entries({ keys, values })) {
    expectThat('hcAttentionStore', subject, given, typeof given === 'string' && Object.hasOwn(bitsOf, given), codecs);
  }
  if ((valuesOn as unknown) !== 'device') {
    throw new CapabilityError(`hcAttentionStore: valuesOn is ${show(valuesOn)}; values can be on the device: give 'device'.`, {
      subject: 'valuesOn',
      given: valuesOn,
      wanted: 'device',
    });
  }
  for (const [subject, given] of Object.entries({ sinkTokens, localWindow })) {
    if (Number.isSafeInteger(given) && given >= 0) continue;
    throw new InvalidValueError(`${subject} is ${show(given)}; it must be a whole number of tokens, 0 or more.`, {
      subject,
      given,
    });
  }
  expectThat('hcAttentionStore', 'dtype', dtype, dtype === undefined || floats.includes(dtype), floats.join(', '));
  const name = keys === values ? `hcattn ${keys}` : `hcattn ${keys} keys, ${values} values`;
  const kept = { sinkBlocks: Math.ceil(sinkTokens / blockTokens), localWindow };
  return {
    name,
    create(given, capacity) {
      const layers = expectCapacity(given, capacity);
      const [first] = layers;
      if (first === undefined) return [];
      const { device, prefill } = capacity;
      const whilePrompts = prefill !== undefined && quantizesPrompts.of(prefill) !== undefined;
      const denseCapacity = whilePrompts ? capacityOf(capacity, kept) : capacity;
      const undo: (() => void)[] = [];
      const undone = <Kind extends Disposable>(made: Kind): Kind => {
        undo.push(() => made[Symbol.dispose]());
        return made;
      };
      try {
        const dense = densePagedStores(layers, denseCapacity, { name, dtype, blockTokens });
        undo.push(() => dense.forEach((store) => store.dispose()));
        const pools = undone(
          new QuantizedPools({
            device,
            headDim: first.headDim,
            keyBits: bitsOf[keys],
            valueBits: bitsOf[values],
            blocks: Math.ceil(capacity.tokens / blockTokens) * layers.reduce((sum, { kvHeads }) => sum + kvHeads, 0),
          }),
        );
        const scratch = undone(new AttentionScratch(layers, capacity, dense[0]?.denseBlocks().keys.dtype ?? 'f16'));
        let open = layers.length;
        const close = () => {
          if (--open > 0) return;
          pools[Symbol.dispose]();
          scratch[Symbol.dispose]();
        };
        const parts = { name, capacity, codec: pools, scratch, ...kept, quantizesPrompts: whilePrompts, close };
        const shared = { device: (pools.reserved().device + scratch.byteLength) / layers.length, host: 0 };
        return dense.map((ofLayer) => {
          const store = new QuantizedStore({ ...parts, layer: ofLayer.layer, shared, dense: ofLayer });
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

/** What stays dense of prompts that are quantized while they are read: a step's rows, sinks, windows and open blocks. */
function capacityOf(capacity: KvCapacity, { sinkBlocks, localWindow }: DenseTokens): KvCapacity {
  const { slots, tokens, tokensPerSlot, batchRows = tokens } = capacity;
  const ofSlot = (sinkBlocks + Math.ceil(localWindow / blockTokens) + 1) * blockTokens;
  return {
    ...capacity,
    tokens: Math.min(tokens, slots * ofSlot + batchRows),
    tokensPerSlot: Math.min(tokensPerSlot, ofSlot + batchRows),
  };
}
