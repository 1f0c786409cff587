import type { HostPool, KvBytes, KvLayer } from '@kv/sparse-core';
import { BlockIds, hostMemoryOf, LinkStream, madeTogether } from '@kv/sparse-core/native';
import type { BlockCodec, CodeCache } from './block-codec.js';
import { ChoiceRoom, type ChoiceSizes } from './choice-room.js';
import { type Choice, CodedBlocks, type CodedPools } from './coded-blocks.js';
import { HeadGroups, headBoundsOf } from './head-groups.js';
import { blocksOf, HostBlocks, type HostBlockSizes } from './host-blocks.js';
import type { KeyFormat, KeyPool } from './key-format.js';
import { StagedBlocks, stagedSizes } from './staged-blocks.js';

export interface CodedSizes extends ChoiceSizes, HostBlockSizes {}

export interface CodedCacheOptions extends CodedSizes {
  readonly tau: number;
  readonly keys: KeyFormat;
  readonly hostPool: HostPool | undefined;
}

/** Keys in codes on the device, values on the host, of all layers of a cache. */
export class CodedCache implements CodeCache {
  readonly #choice: Choice;
  readonly #keys: KeyPool;
  readonly #pools: CodedPools;
  readonly #room: ChoiceRoom;
  /** Of each layer. */
  readonly #groups: readonly HeadGroups[];
  readonly #links: readonly LinkStream[];

  /** What it takes of a host pool. */
  static hostBytes(sizes: CodedSizes): number {
    const staged = stagedSizes(sizes);
    return HostBlocks.hostBytes(sizes) + ChoiceRoom.hostBytes(sizes) + (staged ? StagedBlocks.hostBytes(staged) : 0);
  }

  /**
   * @throws what making a pool of the keys' format does; DeviceError, InvalidValueError for a wrong host pool, or none;
   * OutOfMemoryError; all is given back then
   */
  constructor(options: CodedCacheOptions) {
    const { layers, capacity, keys: format, hostPool, tau, missingMass } = options;
    const { device } = capacity;
    const blocks = blocksOf(layers, capacity);
    this.#choice = { tau, missingMass };
    // A mean value has one table for all kv heads.
    const bounds = layers.map((layer) => (missingMass === 'meanValue' ? [0, layer.kvHeads] : headBoundsOf(layer, capacity)));
    const groups = Math.max(...bounds.map(({ length }) => length - 1));
    const hasLinks = groups > 1 && device.kind === 'cuda';
    [this.#keys, this.#pools, this.#room, this.#groups, this.#links] = madeTogether((own) => {
      const keys = own(format.createPool(layers, device, blocks));
      const memory = hostMemoryOf('hcAttentionStore', device, hostPool, CodedCache.hostBytes(options));
      const host = own(new HostBlocks(options, memory));
      const ofBlock = host.blockBytes;
      const sizes = stagedSizes(options);
      const staged = sizes && own(new StagedBlocks(sizes, device, memory, host.values));
      const blockBytes = { device: keys.blockBytes + ofBlock.device, host: ofBlock.host };
      return [
        keys,
        { ids: new BlockIds('coded blocks', blocks), blockBytes, host, staged },
        own(new ChoiceRoom(options, memory, hasLinks)),
        groups > 1 ? layers.map((layer, index) => own(new HeadGroups(layer, capacity, bounds[index] ?? []))) : [],
        hasLinks ? Array.from({ length: groups }, () => own(new LinkStream(device))) : [],
      ];
    });
  }

  get fetches(): boolean {
    return this.#pools.staged !== undefined;
  }

  codecOf(layer: KvLayer, index: number): BlockCodec {
    const overlap = { groups: this.#groups[index], links: this.#links };
    return new CodedBlocks(index, this.#keys.codecOf(layer, index), this.#pools, this.#room, this.#choice, overlap);
  }

  /** Codebooks are the caller's. */
  reserved(): KvBytes {
    const { device, host } = this.#pools.host.bytes;
    const staged = this.#pools.staged?.byteLength ?? 0;
    const tables = this.#groups.reduce((sum, { byteLength }) => sum + byteLength, 0);
    return { device: this.#keys.byteLength + device + this.#room.deviceBytes + tables, host: host + staged + this.#room.hostBytes };
  }

  [Symbol.dispose](): void {
    const { host, staged } = this.#pools;
    for (const each of [this.#keys, host, staged, this.#room, ...this.#groups, ...this.#links]) each?.[Symbol.dispose]();
  }
}
