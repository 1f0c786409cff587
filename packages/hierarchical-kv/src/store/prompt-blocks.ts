import { appendKv, type AppendCall, type AppendKvArguments, type AttentionCall, byteSize, type PagedBlocks, prefillAttention, type RowBatch, type Stream, type Tensor, transferBlocks } from '@kv/sparse-core';
import { KvBlockPool, LinkStream, madeTogether } from '@kv/sparse-core/native';
import type { BlockTableHandle } from '../operations/block-batch.js';
import { blockMetadata } from '../operations/block-metadata.js';
import { fetchBlocks } from '../operations/fetch-blocks.js';
import { placeBlocks, type PlaceBlocksArguments } from '../operations/place-blocks.js';
import type { PlannedBlocks } from '../operations/plan-blocks.js';
import { methodOf } from '../block-metadata-method.js';
import { blockBytes, blockTokens, fixedPlaces, type LayerSizes, tableWidth } from './block-sizes.js';
import type { DeviceBlocks } from './device-blocks.js';
import type { BlocksToMake } from './made-metadata.js';

/** What the host has of a prompt in one layer. */
export interface HostPrompt {
  /** The layer's number. */
  readonly layer: number;
  readonly slot: number;
  /** Of each kv head. */
  readonly tokens: readonly number[];
  readonly host: Pick<PagedBlocks, 'keys' | 'values'>;
  /** The blocks of each kv head there, for these tokens or more. */
  readonly hostBlocks: readonly Int32Array[];
}

/** Rows of one prompt in one layer, behind what the host has of it. */
export interface PromptRows extends Pick<AttentionCall, 'query' | 'output' | 'scale'>, Pick<AppendCall, 'keys' | 'values'> {
  readonly earlier: HostPrompt;
  /** The same of the next layer. Left out for the last one. */
  readonly next: (() => HostPrompt) | undefined;
  /** Whether the host has the rows already. */
  readonly saved: boolean;
  /** i32 `[1, kvHead]`: tokens, those of the rows included. */
  readonly keyCounts: PagedBlocks['keyCounts'];
  /** i32: 0 and the number of rows. */
  readonly queryStart: RowBatch['queryStart'];
  /** Where the blocks go that the rows fill, and what they are scored by. */
  readonly device: DeviceBlocks;
  /** i32: the blocks of the host, by which `device` knows them. */
  readonly hostTable: BlockTableHandle;
  /** Makes the metadata of full blocks, where a user's maker does. */
  readonly make: (blocks: BlocksToMake) => void;
}

/**
 * Room for the keys and values of the longest prompt in one layer, which prompts and layers use in turn. What it has of a prompt
 * goes to host memory by the copy engine, beside the attention over it.
 */
export class PromptBlocks implements Disposable {
  readonly #link: LinkStream;
  /** Whose first tokens it has. */
  #holds: Pick<HostPrompt, 'layer' | 'slot' | 'tokens'> | undefined;
  /** What the rows that were attended to last were behind. */
  #before: HostPrompt | undefined;
  readonly #pool: KvBlockPool;
  /** Every block of a kv head is behind the one before. */
  readonly #table: Tensor<'i32', readonly ['slot', 'kvHead', 'block']>;
  readonly #slots: Tensor<'i32', readonly ['batch']>;
  readonly #placed: { readonly [Name in 'loads' | 'loadCount']: PlannedBlocks[Name] & Tensor };
  readonly #sizes: LayerSizes;
  readonly #width: number;

  static bytes({ layer, capacity, dtype }: LayerSizes): number {
    const blocks = layer.kvHeads * tableWidth(capacity);
    return blocks * blockBytes(layer.headDim, byteSize(dtype)) + 4 * (3 * blocks + 2);
  }

  /** @throws OutOfMemoryError */
  constructor(sizes: LayerSizes) {
    const { layer, capacity, dtype } = sizes;
    const { device } = capacity;
    const { kvHeads, headDim } = layer;
    this.#sizes = sizes;
    this.#width = tableWidth(capacity);
    const blocks = kvHeads * this.#width;
    [this.#link, this.#pool, this.#table, this.#slots, this.#placed] = madeTogether((own) => [
      own(new LinkStream(device)),
      own(new KvBlockPool({ memory: device, dtype, headDim, blockTokens, blocks })),
      own(device.tensor('i32', ['slot', 'kvHead', 'block'], [1, kvHeads, this.#width], Int32Array.from({ length: blocks }, (_, block) => block))),
      own(device.tensor('i32', ['batch'], [1], Int32Array.of(0))),
      { loads: own(device.tensor('i32', ['end', 'load'], [2, blocks])), loadCount: own(device.tensor('i32', ['one'], [1])) },
    ]);
  }

  get byteLength(): number {
    const { loads, loadCount } = this.#placed;
    return [this.#table, this.#slots, loads, loadCount].reduce((sum, { byteLength }) => sum + byteLength, this.#pool.byteLength);
  }

  /** Whether something goes on beside the stream that it was not put behind. */
  get isAhead(): boolean {
    return this.#link.isAhead;
  }

  /** Puts what comes next on the stream behind what goes on beside it. */
  join(stream: Stream): void {
    this.#link.join(stream);
  }

  /** Says that a slot, or any, holds other tokens than it did. */
  forget(slot?: number): void {
    if (slot === undefined || this.#holds?.slot === slot) this.#holds = undefined;
    if (slot === undefined || this.#before?.slot === slot) this.#before = undefined;
  }

  /**
   * Writes rows behind what their slot holds, which comes from the host unless it is there already.
   * @param keyCounts i32 `[1, kvHead]`: tokens in front of the rows, which are added
   */
  append(stream: Stream, earlier: HostPrompt, { keyCounts, ...rows }: Omit<AppendKvArguments, 'blocks' | 'slots'> & Pick<PagedBlocks, 'keyCounts'>): void {
    const { layer, slot, tokens } = earlier;
    this.#link.join(stream);
    if (!isSame(this.#holds, earlier)) this.#load(stream, earlier);
    this.#holds = { layer, slot, tokens };
    appendKv(stream, { ...rows, slots: this.#slots, blocks: { ...this.#blocks, keyCounts } });
    this.#holds = { layer, slot, tokens: tokens.map((held) => held + rows.keys.shape[0]) };
  }

  /**
   * Attention of the rows over all that their slot holds. They are appended first, if they were not. Beside it, and beside what the
   * stream does until it comes here again, the blocks go to the host, and into the device's cache as long as it has room. Where
   * the same rows pass one layer after the other, what the next layer has in front of them is loaded behind that.
   */
  attend(stream: Stream, { keys, values, query, output, scale, earlier, next, device, hostTable, make, saved, keyCounts, queryStart }: PromptRows): void {
    const rows = query.shape[0];
    const { layer, slot, tokens } = earlier;
    if (!isSame(this.#holds, { layer, slot, tokens: tokens.map((held) => held + rows) })) {
      using before = stream.device.tensor('i32', ['slot', 'kvHead'], [1, tokens.length], Int32Array.from(tokens));
      this.append(stream, earlier, { keys, values, queryStart, keyCounts: before });
    }
    const batch = { slots: this.#slots, queryStart };
    const blocks = { ...this.#blocks, keyCounts };
    const { metadata, checksums } = device;
    const checked = checksums && { checksums, values: blocks.values };
    const scored = { metadata, metadataTable: hostTable, method: methodOf(this.#sizes.metadata), ...checked };
    blockMetadata(stream, { ...batch, ...scored, keys: blocks.keys, blockTable: this.#table, keyCounts, rows });
    make({ keys: blocks.keys, ...this.#filled(earlier, rows) });
    const beside = this.#link.behind(stream);
    if (!saved) this.#save(beside, earlier, rows);
    this.#keep(beside, device, { ...batch, blockTable: hostTable, keyCounts, rows });
    prefillAttention(stream, { ...batch, query, output, blocks, scale, causal: true });
    // Whoever knows that the stream's work on a prompt is done knows it of the copies too.
    if (next === undefined) this.#link.join(stream);
    const isNext = isSame(this.#before, { ...earlier, layer: layer - 1 }) && tokens.some((held) => held > 0);
    this.#before = earlier;
    if (!isNext || next === undefined) return;
    const following = next();
    this.#load(this.#link.behind(stream), following);
    this.#holds = following;
  }

  get #blocks(): Omit<PagedBlocks, 'keyCounts'> {
    return { keys: this.#pool.keys, values: this.#pool.values, blockTable: this.#table };
  }

  /** Brings the blocks that the rows filled into the cache, as long as it has room. */
  #keep(stream: Stream, { cache, pool }: DeviceBlocks, batch: Pick<PlaceBlocksArguments, 'slots' | 'queryStart' | 'keyCounts' | 'blockTable' | 'rows'>): void {
    const { where, holds, usedAt } = cache;
    const cached = { where, holds, usedAt, firstCached: fixedPlaces(this.#sizes), sinkBlocks: this.#sizes.sinkBlocks, blockTokens };
    placeBlocks(stream, { ...batch, ...cached, ...this.#placed, sourceTable: this.#table });
    const { keys: hostKeys, values: hostValues } = this.#pool;
    fetchBlocks(stream, { hostKeys, hostValues, keys: pool.keys, values: pool.values, ...this.#placed });
  }

  #load(stream: Stream, { host, hostBlocks, tokens }: HostPrompt): void {
    const [from, to]: [number[], number[]] = [[], []];
    hostBlocks.forEach((held, kvHead) => {
      for (let block = 0; block * blockTokens < (tokens[kvHead] ?? 0); block++) {
        from.push(held[block] ?? NaN);
        to.push(kvHead * this.#width + block);
      }
    });
    if (from.length === 0) return;
    transferBlocks(stream, { source: host.keys, destination: this.#pool.keys, from, to });
    transferBlocks(stream, { source: host.values, destination: this.#pool.values, from, to });
  }

  /** Blocks that the rows filled: where they are here, and on the host. */
  #filled({ hostBlocks, tokens }: HostPrompt, rows: number): { readonly from: number[]; readonly to: number[] } {
    const [from, to]: [number[], number[]] = [[], []];
    hostBlocks.forEach((held, kvHead) => {
      const earlier = tokens[kvHead] ?? 0;
      for (let block = Math.floor(earlier / blockTokens); (block + 1) * blockTokens <= earlier + rows; block++) {
        from.push(kvHead * this.#width + block);
        to.push(held[block] ?? NaN);
      }
    });
    return { from, to };
  }

  #save(copies: Stream, { host, hostBlocks, tokens }: HostPrompt, rows: number): void {
    const [from, to]: [number[], number[]] = [[], []];
    hostBlocks.forEach((held, kvHead) => {
      const earlier = tokens[kvHead] ?? 0;
      for (let block = Math.floor(earlier / blockTokens); block * blockTokens < earlier + rows; block++) {
        from.push(kvHead * this.#width + block);
        to.push(held[block] ?? NaN);
      }
    });
    transferBlocks(copies, { source: this.#pool.keys, destination: host.keys, from, to });
    transferBlocks(copies, { source: this.#pool.values, destination: host.values, from, to });
  }

  [Symbol.dispose](): void {
    this.#link[Symbol.dispose]();
    this.#pool.dispose();
    this.#table.dispose();
    this.#slots.dispose();
    for (const tensor of Object.values(this.#placed)) tensor.dispose();
  }
}

/** Whether these are the same tokens. */
function isSame(one: Pick<HostPrompt, 'layer' | 'slot' | 'tokens'> | undefined, other: Pick<HostPrompt, 'layer' | 'slot' | 'tokens'>): boolean {
  return one?.layer === other.layer && one.slot === other.slot && one.tokens.every((tokens, kvHead) => tokens === other.tokens[kvHead]);
}
