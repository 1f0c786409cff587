import { pinnedBlocks } from './scheduler-options.js';
import type { Settings } from './scheduler-options.js';

/** How many blocks of one layer requests take. */
export class BlockCounts {
  /** What the smallest budget reads. */
  readonly least: number;
  readonly #settings: Settings;
  /** Of each kv head. */
  readonly #pinned: number;

  constructor(settings: Settings) {
    this.#settings = settings;
    this.#pinned = pinnedBlocks(settings);
    this.least = settings.features.offload ? settings.model.kvHeads : 0;
  }

  /** Keys and values of so many tokens. */
  ofTokens(tokens: number): number {
    return this.tokenBlocks(tokens) * this.#settings.model.kvHeads;
  }

  /** Blocks of each kv head that hold so many tokens. */
  tokenBlocks(tokens: number): number {
    return Math.ceil(tokens / this.#settings.blockTokens);
  }

  /** What a request holds on the device between its steps, when it is to have `tokens` in all. */
  held(tokens: number, promptTokens: number, isReading: boolean): number {
    const { features, promptsApart } = this.#settings;
    if (promptsApart) return 0;
    const all = this.ofTokens(tokens);
    const metadata = features.sparse ? this.#metadata(all) : 0;
    if (!features.offload) return all + metadata;
    return metadata + (isReading ? this.#prompt(promptTokens) : 0);
  }

  /** What a step reads of a request of so many tokens, beside pinned blocks. Default: all of them. */
  read(tokens: number, budgetTokens = Infinity): number {
    const { blockTokens, model } = this.#settings;
    const blocks = Math.min(this.tokenBlocks(tokens), Math.floor(budgetTokens / blockTokens));
    return Math.max(0, blocks - this.#pinned) * model.kvHeads;
  }

  /** The budget of which a step reads at most so many blocks, beside pinned ones. */
  budgetOf(blocks: number): number {
    const { blockTokens, model } = this.#settings;
    return (Math.floor(blocks / model.kvHeads) + this.#pinned) * blockTokens;
  }

  /** Metadata has `metadataVectors` rows of a head, where a block has `blockTokens` keys and as many values. */
  #metadata(blocks: number): number {
    const { metadataVectors, blockTokens } = this.#settings;
    return Math.ceil((blocks * metadataVectors) / (2 * blockTokens));
  }

  /** In layer segments all layers share what one layer of a prompt takes, and the rows that wait between two layers. */
  #prompt(tokens: number): number {
    const { features, model, blockTokens } = this.#settings;
    const blocks = this.ofTokens(tokens);
    if (!features.layerSegments) return blocks;
    const rows = (tokens * model.hiddenSize) / (2 * blockTokens * model.headDim);
    return Math.ceil((blocks + rows) / model.layers);
  }
}
