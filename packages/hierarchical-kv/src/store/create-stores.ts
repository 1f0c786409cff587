import { byteSize, CapabilityError, type HostPool, type KvCapacity, type KvLayer, type KvStore, OutOfMemoryError } from '@kv/sparse-core';
import { bytesOfPool, densePagedStores, hostMemoryOf } from '@kv/sparse-core/native';
import { blockBytes, type BlockSizes, blockTokens, cachedBlocksRead, hostBlocksOf, type LayerSizes, tableWidth } from './block-sizes.js';
import { DeviceBlocks } from './device-blocks.js';
import { HierarchicalLayerStore } from './hierarchical-layer-store.js';
import { MadeMetadata } from './made-metadata.js';
import { NewestDemand } from './newest-demand.js';
import { PromptBlocks } from './prompt-blocks.js';
import { StepScratch } from './step-scratch.js';

export interface StoresOptions extends BlockSizes {
  readonly name: string;
  readonly dtype: LayerSizes['dtype'] | undefined;
}

export interface StoresMemory {
  readonly deviceBytes: number;
  readonly hostPool: HostPool | undefined;
}

/** Bytes of a host pool that all layers take. */
export function hostBytes(layers: readonly KvLayer[], capacity: KvCapacity, dtype: LayerSizes['dtype'] | undefined): number {
  const elementBytes = byteSize(dtypeOf(capacity, dtype));
  const ofLayer = (layer: KvLayer) => bytesOfPool(hostBlocksOf(layer, capacity) * blockBytes(layer.headDim, elementBytes));
  return layers.reduce((sum, layer) => sum + ofLayer(layer), 0);
}

/** Bytes of the device that all layers take, if steps of so many answers shall find room for what they read. */
export function deviceBytesFor(layers: readonly KvLayer[], capacity: KvCapacity, options: StoresOptions, answers: number): number {
  const sizes = sizesOf(layers, capacity, { ...options, dtype: dtypeOf(capacity, options.dtype) });
  const [first] = sizes;
  return first === undefined ? 0 : bytesWith(sizes, cachedFor(first, answers));
}

/**
 * The stores of layers, which work in the same memory in turn.
 * @throws OutOfMemoryError, CapabilityError, InvalidValueError; everything is given back then
 */
export function createStores(layers: readonly KvLayer[], capacity: KvCapacity, options: StoresOptions, { deviceBytes, hostPool }: StoresMemory): KvStore[] {
  const { name } = options;
  const dtype = dtypeOf(capacity, options.dtype);
  const sizes = sizesOf(layers, capacity, { ...options, dtype });
  const [first] = sizes;
  if (first === undefined) return [];
  const cached = cachedOf(sizes, deviceBytes);
  const memory = hostMemoryOf(name, capacity.device, hostPool, hostBytes(layers, capacity, dtype));
  const undo: (() => void)[] = [];
  const undone = <Kind extends Disposable>(made: Kind): Kind => {
    undo.push(() => made[Symbol.dispose]());
    return made;
  };
  try {
    const [scratch, prompts] = [undone(new StepScratch(first)), undone(new PromptBlocks(first))];
    const made = typeof first.metadata === 'string' ? undefined : undone(new MadeMetadata(first.metadata, first));
    const demand = undone(new NewestDemand(first.layer, capacity, layers.length));
    const blocks = hostBlocksOf(first.layer, capacity);
    const hosts = densePagedStores(layers, capacity, { name, dtype, blockTokens, blocksOfLayer: blocks, memory, inStep: true });
    for (const host of hosts) undo.push(() => host.dispose());
    let open = layers.length;
    const close = () => {
      if (--open > 0) return;
      scratch[Symbol.dispose]();
      prompts[Symbol.dispose]();
      made?.[Symbol.dispose]();
      demand[Symbol.dispose]();
    };
    const stores: HierarchicalLayerStore[] = [];
    for (const [index, ofLayer] of sizes.entries()) {
      const host = hosts[index];
      if (host === undefined) throw new Error('there is a store for each layer');
      const device = undone(new DeviceBlocks(ofLayer, cached, demand.ofLayer(index)));
      const shared = {
        device: (scratch.byteLength + prompts.byteLength + (made?.byteLength ?? 0)) / layers.length + tableBytes(ofLayer),
        host: blocks * device.pool.blockBytes,
      };
      const next = () => stores[index + 1];
      stores.push(new HierarchicalLayerStore({ name, sizes: ofLayer, index, host, device, demand, scratch, prompts, made, shared, next, close }));
    }
    return stores;
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
  const { budgetBlocks, sinkBlocks, recentBlocks, metadata, checksums, dtype } = options;
  const kvHeads = [...new Set(layers.map((layer) => layer.kvHeads))];
  if (kvHeads.length > 1) {
    throw new CapabilityError(`${options.name}: the layers have ${kvHeads.join(', ')} kv heads; all must have as many.`, {
      subject: 'layers',
      given: kvHeads,
    });
  }
  return layers.map((layer) => ({ budgetBlocks, sinkBlocks, recentBlocks, metadata, checksums, dtype, layer, capacity }));
}

/** Of the store of the host's blocks, whose tables are on the device, and the counts of what is read. */
function tableBytes({ layer, capacity }: LayerSizes): number {
  return 4 * capacity.slots * layer.kvHeads * (tableWidth(capacity) + 1) + NewestDemand.bytes(layer, capacity);
}

/** Blocks that a step of so many answers reads of a layer's cache, of the longest sequences: one of each kv head, if they read none. */
function cachedFor(sizes: LayerSizes, answers: number): number {
  const { layer, capacity } = sizes;
  const read = answers * layer.kvHeads * cachedBlocksRead(sizes, capacity.tokensPerSlot);
  // Schedulers count in budgets, of which the smallest chooses one.
  return Math.max(layer.kvHeads, Math.min(read, hostBlocksOf(layer, capacity)));
}

/** Bytes of the device of all layers, with so many blocks in the cache of each. */
function bytesWith(sizes: readonly LayerSizes[], cached: number): number {
  const [first] = sizes as readonly [LayerSizes];
  return StepScratch.bytes(first) + PromptBlocks.bytes(first) + MadeMetadata.bytes(first) + sizes.length * (DeviceBlocks.bytes(first, cached) + tableBytes(first));
}

/**
 * Blocks of the cache of each layer.
 * @throws OutOfMemoryError when the longest sequence reads more in a step
 */
function cachedOf(sizes: readonly LayerSizes[], deviceBytes: number): number {
  const [first] = sizes as readonly [LayerSizes];
  const least = cachedFor(first, 1);
  const wanted = bytesWith(sizes, least);
  const ofBlock = bytesWith(sizes, least + 1) - wanted;
  if (deviceBytes >= wanted) return Math.min(least + Math.floor((deviceBytes - wanted) / ofBlock), hostBlocksOf(first.layer, first.capacity));
  throw new OutOfMemoryError(
    `hierarchicalStore: deviceBytes are ${deviceBytes}, and a step of the longest sequence takes ${wanted}. ` +
      'Give it more, a smaller budgetTokens, fewer sequences, or shorter ones.',
    { subject: 'deviceBytes', given: deviceBytes, wanted },
  );
}
