import { byteSize, CapabilityError, type HostPool, type KvCapacity, type KvLayer, type KvStore, OutOfMemoryError } from '@kv/sparse-core';
import { bytesOfPool, densePagedStores, hostMemoryOf } from '@kv/sparse-core/native';
import { type BlockSizes, blockTokens, cachedBlocksRead, hostBlocksOf, type LayerSizes, tableWidth } from './block-sizes.js';
import { blockBytes, DeviceBlocks } from './device-blocks.js';
import { HierarchicalLayerStore } from './hierarchical-layer-store.js';
import { NewestDemand } from './newest-demand.js';
import { PromptBlocks } from './prompt-blocks.js';
import { StepScratch } from './step-scratch.js';

export interface StoresOptions extends BlockSizes {
  readonly name: string;
  readonly dtype: LayerSizes['dtype'] | undefined;
  readonly deviceBytes: number;
  readonly hostPool: HostPool | undefined;
}

/** Bytes of a host pool that all layers take. */
export function hostBytes(layers: readonly KvLayer[], capacity: KvCapacity, dtype: LayerSizes['dtype'] | undefined): number {
  const elementBytes = byteSize(dtypeOf(capacity, dtype));
  const ofLayer = (layer: KvLayer) => bytesOfPool(hostBlocksOf(layer, capacity) * blockBytes(layer.headDim, elementBytes));
  return layers.reduce((sum, layer) => sum + ofLayer(layer), 0);
}

/**
 * The stores of layers, which work in the same memory in turn.
 * @throws OutOfMemoryError, CapabilityError, InvalidValueError; everything is given back then
 */
export function createStores(layers: readonly KvLayer[], capacity: KvCapacity, options: StoresOptions): KvStore[] {
  const { name, deviceBytes, hostPool } = options;
  const dtype = dtypeOf(capacity, options.dtype);
  const sizes = sizesOf(layers, capacity, { ...options, dtype });
  const [first] = sizes;
  if (first === undefined) return [];
  const memory = hostMemoryOf(name, capacity.device, hostPool, hostBytes(layers, capacity, dtype));
  const undo: (() => void)[] = [];
  const undone = <Kind extends Disposable>(made: Kind): Kind => {
    undo.push(() => made[Symbol.dispose]());
    return made;
  };
  try {
    const [scratch, prompts] = [undone(new StepScratch(first)), undone(new PromptBlocks(first))];
    const cached = cachedOf(sizes, deviceBytes - scratch.byteLength - prompts.byteLength);
    let open = layers.length;
    const close = () => {
      if (--open > 0) return;
      scratch[Symbol.dispose]();
      prompts[Symbol.dispose]();
    };
    return sizes.map((ofLayer) => {
      const { layer } = ofLayer;
      const blocks = hostBlocksOf(layer, capacity);
      const [host] = densePagedStores([layer], capacity, { name, dtype, blockTokens, blocks, memory });
      if (host === undefined) throw new Error('there is a store for each layer');
      undo.push(() => host.dispose());
      const device = undone(new DeviceBlocks(ofLayer, cached));
      const shared = {
        device: (scratch.byteLength + prompts.byteLength) / layers.length + tableBytes(ofLayer),
        host: blocks * device.pool.blockBytes,
      };
      const demand = new NewestDemand(device.cache.demand);
      return new HierarchicalLayerStore({ name, sizes: ofLayer, host, device, demand, scratch, prompts, shared, close });
    });
  } catch (error) {
    for (const each of undo.reverse()) each();
    throw error;
  }
}

function dtypeOf({ rowDType }: KvCapacity, dtype: LayerSizes['dtype'] | undefined): LayerSizes['dtype'] {
  return dtype ?? (rowDType === 'bf16' ? 'bf16' : 'f16');
}

/** @throws CapabilityError unless all layers have as many kv heads */
function sizesOf(layers: readonly KvLayer[], capacity: KvCapacity, options: StoresOptions & Pick<LayerSizes, 'dtype'>): LayerSizes[] {
  const { budgetBlocks, sinkBlocks, recentBlocks, metadata, dtype } = options;
  const kvHeads = [...new Set(layers.map((layer) => layer.kvHeads))];
  if (kvHeads.length > 1) {
    throw new CapabilityError(`${options.name}: the layers have ${kvHeads.join(', ')} kv heads; all must have as many.`, {
      subject: 'layers',
      given: kvHeads,
    });
  }
  return layers.map((layer) => ({ budgetBlocks, sinkBlocks, recentBlocks, metadata, dtype, layer, capacity }));
}

/** Of the store of the host's blocks, whose tables are on the device. */
function tableBytes({ layer, capacity }: LayerSizes): number {
  return 4 * capacity.slots * layer.kvHeads * (tableWidth(capacity) + 1);
}

/**
 * Blocks of the cache of each layer.
 * @throws OutOfMemoryError when the longest sequence reads more in a step
 */
function cachedOf(sizes: readonly LayerSizes[], bytes: number): number {
  const [first] = sizes as readonly [LayerSizes];
  const { layer, capacity, dtype } = first;
  const elementBytes = byteSize(dtype);
  const fixed = DeviceBlocks.bytes(first, elementBytes) + tableBytes(first);
  const ofBlock = blockBytes(layer.headDim, elementBytes) + 8;
  const cached = Math.floor((bytes / sizes.length - fixed) / ofBlock);
  const least = Math.max(1, layer.kvHeads * cachedBlocksRead(first, capacity.tokensPerSlot));
  if (cached >= least) return Math.min(cached, hostBlocksOf(layer, capacity));
  const lacking = Math.ceil((fixed + least * ofBlock) * sizes.length - bytes);
  throw new OutOfMemoryError(
    `hierarchicalStore: deviceBytes lack ${lacking} bytes for what a step of the longest sequence reads. ` +
      'Give it more, a smaller budgetTokens, fewer sequences, or shorter ones.',
    { subject: 'deviceBytes', wanted: lacking },
  );
}
