import { appendKv, type AppendCall, type AppendKvArguments, type AttentionCall, byteSize, type PagedBlocks, prefillAttention, type RowBatch, type Stream, type Tensor, transferBlocks } from '@kv/sparse-core';
import { KvBlockPool, LinkStream, madeTogether } from '@kv/sparse-core/native';
import { blockMetadata, type BlockMetadataArguments } from '../operations/block-metadata.js';
import { blockBytes, blockTokens, type LayerSizes, tableWidth } from './block-sizes.js';

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
  /** The same of the next layer, if there is one. */
  readonly next: () => HostPrompt | undefined;
  /** Whether the host has the rows already. */
  readonly saved: boolean;
  /** i32 `[1, kvHead]`: tokens, those of the rows included. */
  readonly keyCounts: PagedBlocks['keyCounts'];
  /** i32: 0 and the number of rows. */
  readonly queryStart: RowBatch['queryStart'];
  /** Where the metadata of the blocks goes that the rows fill. */
  readonly described: Pick<BlockMetadataArguments, 'metadata' | 'metadataTable' | 'method' | 'checksums'>;
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
  readonly #width: number;

  static bytes({ layer, capacity, dtype }: LayerSizes): number {
    const blocks = layer.kvHeads * tableWidth(capacity);
    return blocks * blockBytes(layer.headDim, byteSize(dtype)) + 4 * (blocks + 1);
  }

  /** @throws OutOfMemoryError */
  constructor({ layer, capacity, dtype }: LayerSizes) {
    const { device } = capacity;
    const { kvHeads, headDim } = layer;
    this.#width = tableWidth(capacity);
    const blocks = kvHeads * this.#width;
    [this.#link, this.#pool, this.#table, this.#slots] = madeTogether((own) => [
      own(new LinkStream(device)),
      own(new KvBlockPool({ memory: device, dtype, headDim, blockTokens, blocks })),
      own(device.tensor('i32', ['slot', 'kvHead', 'block'], [1, kvHeads, this.#width], Int32Array.from({ length: blocks }, (_, block) => block))),
      own(device.tensor('i32', ['batch'], [1], Int32Array.of(0))),
    ]);
  }

  get byteLength(): number {
    return this.#pool.byteLength + this.#table.byteLength + this.#slots.byteLength;
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
   * Attention of the rows over all that their slot holds. They are appended first, if they were not. Where the same rows pass one
   * layer after the other, what the next layer has in front of them is loaded behind it.
   */
  attend(stream: Stream, { keys, values, query, output, scale, earlier, next, described, saved, keyCounts, queryStart }: PromptRows): void {
    const rows = query.shape[0];
    const { layer, slot, tokens } = earlier;
    if (!isSame(this.#holds, { layer, slot, tokens: tokens.map((held) => held + rows) })) {
      using before = stream.device.tensor('i32', ['slot', 'kvHead'], [1, tokens.length], Int32Array.from(tokens));
      this.append(stream, earlier, { keys, values, queryStart, keyCounts: before });
    }
    const batch = { slots: this.#slots, queryStart };
    const blocks = { ...this.#blocks, keyCounts };
    const checked = described.checksums && { values: blocks.values };
    blockMetadata(stream, { ...batch, ...described, ...checked, keys: blocks.keys, blockTable: this.#table, keyCounts, rows });
    if (!saved) this.#save(this.#link.behind(stream), earlier, rows);
    prefillAttention(stream, { ...batch, query, output, blocks, scale, causal: true });
    // Whoever knows that the stream's work is done knows it of the copies too.
    this.#link.join(stream);
    const isNext = isSame(this.#before, { ...earlier, layer: layer - 1 }) && tokens.some((held) => held > 0);
    this.#before = earlier;
    const following = isNext ? next() : undefined;
    if (following === undefined) return;
    this.#load(this.#link.behind(stream), following);
    this.#holds = following;
  }

  get #blocks(): Omit<PagedBlocks, 'keyCounts'> {
    return { keys: this.#pool.keys, values: this.#pool.values, blockTable: this.#table };
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
  }
}

/** Whether these are the same tokens. */
function isSame(one: Pick<HostPrompt, 'layer' | 'slot' | 'tokens'> | undefined, other: Pick<HostPrompt, 'layer' | 'slot' | 'tokens'>): boolean {
  return one?.layer === other.layer && one.slot === other.slot && one.tokens.every((tokens, kvHead) => tokens === other.tokens[kvHead]);
}
