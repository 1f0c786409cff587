import type { Features, ModelShape } from '../scheduler/scheduler-options.js';

/** A model as the paper's evaluation has it, and the memory that its GPU leaves for the cache. */
export interface SimulatedModel extends ModelShape {
  readonly queryHeads: number;
  /** Numbers that a step reads of its weights. */
  readonly parameters: number;
  /** Tokens of the longest request. */
  readonly contextTokens: number;
  /** What its tokenizer makes of an English word, and of a Chinese character. */
  readonly tokensPer: { readonly word: number; readonly character: number };
  /** Bytes of the cache on the device, of all layers. */
  readonly deviceBytes: number;
  /** Bytes of the cache in host memory, of all layers. */
  readonly hostBytes: number;
  /** R_max. Default 32. */
  readonly maxRequests?: number | undefined;
}

const gibibyte = 2 ** 30;
const shape = { layers: 32, headDim: 128, hiddenSize: 4096, queryHeads: 32, hostBytes: 200 * gibibyte };

/**
 * Llama 2's tokenizer, which LWM has, makes 29,869 tokens of NarrativeQA's 18,409 words, and of Chinese 1.25 a character. What
 * Llama 3's makes is an assumption.
 */
const tokensPer = { llama2: { word: 1.62, character: 1.25 }, llama3: { word: 1.35, character: 0.95 } };

/**
 * The device has as much as an A100 of 40 GB leaves beside the weights, in f16. It holds what some 12 answers of LWM-7B read, and
 * some 50 of Llama 3 8B, whose cache is a quarter of the size.
 */
export const simulatedModels = {
  'lwm-7b': { ...shape, kvHeads: 32, parameters: 6_607_077_376, tokensPer: tokensPer.llama2, contextTokens: 32_768, deviceBytes: 22 * gibibyte },
  'llama3-8b': { ...shape, kvHeads: 8, parameters: 7_504_924_672, tokensPer: tokensPer.llama3, contextTokens: 131_072, deviceBytes: 19 * gibibyte, maxRequests: 64 },
} as const satisfies Record<string, SimulatedModel>;

export type SimulatedModelName = keyof typeof simulatedModels;

/** What a system has of SparseServe. */
export interface SystemFeatures extends Features {
  /** Blocks are moved by one kernel and one contiguous copy, not each by a copy of its own (+FT). It changes no decision. */
  readonly fastTransfer: boolean;
}

const base: SystemFeatures = { sparse: false, offload: false, fastTransfer: false, workingSetControl: false, layerSegments: false };

/** From nothing to all, in the paper's order (Fig. 13). */
export const systems = {
  base,
  '+SA': { ...base, sparse: true },
  '+Offload': { ...base, sparse: true, offload: true },
  '+FT': { ...base, sparse: true, offload: true, fastTransfer: true },
  '+WC': { ...base, sparse: true, offload: true, fastTransfer: true, workingSetControl: true },
  '+LP': { sparse: true, offload: true, fastTransfer: true, workingSetControl: true, layerSegments: true },
} as const satisfies Record<string, SystemFeatures>;

export type SystemName = keyof typeof systems;
