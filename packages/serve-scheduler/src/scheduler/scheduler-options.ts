import { InvalidValueError } from '@kv/sparse-core';
import { expectBoolean, expectCallback, expectObject, expectOptions, expectThat, show } from '@kv/sparse-core/native';

import type { ScheduledRequest } from './request.js';

/** What the scheduler needs to know of a model; a `ModelConfig` is one. */
export interface ModelShape {
  readonly layers: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly hiddenSize: number;
}

/** The parts of SparseServe, each of which can be left out. All out is dense attention over a cache on the device. */
export interface Features {
  /** Answers read the blocks that count, not all (the paper's +SA). */
  readonly sparse: boolean;
  /** Every block is in host memory, and the device caches those that are read (+Offload). */
  readonly offload: boolean;
  /** Answers are admitted to a step by what the last steps read (+WC). Without it all are, and share the cache as they may. */
  readonly workingSetControl: boolean;
  /** Prompts are read layer by layer: on the device is one layer of them at a time (+LP). */
  readonly layerSegments: boolean;
}

export interface SchedulerOptions {
  readonly model: ModelShape;
  /**
   * M_avl: blocks that one layer has on the device, beside the pinned ones of `maxRequests` sequences. A block is
   * `blockTokens` tokens of one kv head, keys and values. Each layer has as many, so that those of one layer are counted.
   */
  readonly deviceBlocks: number;
  /** Blocks that one layer has in host memory. Wanted with `offload`. */
  readonly hostBlocks?: number | undefined;
  /** R_max: requests under way at a time. Default 32. */
  readonly maxRequests?: number | undefined;
  /** T_max: tokens of a step; a token that passes some of the layers counts as that share. Default 2048 + `maxRequests`. */
  readonly maxBatchTokens?: number | undefined;
  /** Tokens × layers of prompts in a step. Default: what `maxBatchTokens` leaves beside all answers, in all layers. */
  readonly maxInjectTokens?: number | undefined;
  /** Prompts are cut at multiples of so many tokens. Default 512. */
  readonly chunkTokens?: number | undefined;
  /** Tokens of a block. Default 32. */
  readonly blockTokens?: number | undefined;
  /** Tokens that a kv head reads in a step, sinks and window included. Default 2048. */
  readonly budgetTokens?: number | undefined;
  /** First tokens that every step reads. Default 32. */
  readonly sinkTokens?: number | undefined;
  /** Newest tokens that every step reads. Default 128. */
  readonly localWindow?: number | undefined;
  /** Vectors of `headDim` numbers that a block is scored by. Default 2. */
  readonly metadataVectors?: number | undefined;
  /**
   * Tokens of an answer that host memory is promised for when its request begins. Fewer than answers turn out to have
   * let more requests in; when memory runs out, the least computed one is read again later. Default: all.
   */
  readonly reservedAnswerTokens?: number | undefined;
  /**
   * Whether prompts and metadata have device memory of their own, as in `hierarchicalStore`: the answers have all `deviceBlocks`
   * then. Wants `offload`. Default: false.
   */
  readonly promptsApart?: boolean | undefined;
  /**
   * Asked when a request begins, also once more after it lost its memory: how many of its first tokens are in memory already,
   * because another request began with the same ones. Fewer than its prompt has. Default: none.
   */
  readonly reuse?: ((request: ScheduledRequest) => number) | undefined;
  /** Default: all on. */
  readonly features?: Partial<Features> | undefined;
}

type Counts = Omit<SchedulerOptions, 'model' | 'features' | 'promptsApart' | 'reuse'>;
export type Settings = { readonly [Name in keyof Counts]-?: number } & {
  readonly model: ModelShape;
  readonly features: Features;
  readonly promptsApart: boolean;
  readonly reuse: (request: ScheduledRequest) => number;
};

/** Blocks and tokens are numbered in i32. */
const mostCount = 2 ** 31 - 1;

const featureNames = ['sparse', 'offload', 'workingSetControl', 'layerSegments'] as const;
/** What each feature needs of the others. */
const foundations: readonly (readonly [keyof Features, keyof Features])[] = [
  ['offload', 'sparse'],
  ['workingSetControl', 'offload'],
];

/**
 * The options with all defaults, copied.
 * @throws InvalidValueError for what is no option, or options that contradict each other
 */
export function readSettings(given: SchedulerOptions): Settings {
  expectOptions('Scheduler', given, {
    ...{ model: true, deviceBlocks: true, hostBlocks: true, maxRequests: true, maxBatchTokens: true, maxInjectTokens: true, chunkTokens: true },
    ...{ blockTokens: true, budgetTokens: true, sinkTokens: true, localWindow: true, metadataVectors: true, reservedAnswerTokens: true },
    ...{ promptsApart: true, reuse: true, features: true },
  });
  const features = readFeatures(given.features);
  const model = readShape(given.model);
  const { deviceBlocks, maxRequests = 32, chunkTokens = 512, reservedAnswerTokens = mostCount } = given;
  // The defaults of others are made of these.
  expectCount('maxRequests', maxRequests, 1);
  expectCount('chunkTokens', chunkTokens, 1);
  const { maxBatchTokens = maxRequests + Math.max(2048, chunkTokens) } = given;
  expectCount('maxBatchTokens', maxBatchTokens, 1);
  const { maxInjectTokens = (maxBatchTokens - maxRequests) * model.layers } = given;
  const { blockTokens = 32, budgetTokens = 2048, sinkTokens = 32, localWindow = 128, metadataVectors = 2 } = given;
  const hostBlocks = given.hostBlocks ?? (features.offload ? NaN : 0);
  const limits = { maxRequests, maxBatchTokens, chunkTokens };
  const positive = { deviceBlocks, maxInjectTokens, blockTokens, budgetTokens };
  const counts = { hostBlocks, sinkTokens, localWindow, metadataVectors, reservedAnswerTokens };
  for (const [name, count] of Object.entries(positive)) expectCount(name, count, 1);
  for (const [name, count] of Object.entries(counts)) expectCount(name, count, 0);
  expectLeast('maxBatchTokens', maxBatchTokens, maxRequests + chunkTokens, 'a chunk of a prompt beside a token of every request');
  const leastInject = features.layerSegments ? chunkTokens : chunkTokens * model.layers;
  expectLeast('maxInjectTokens', maxInjectTokens, leastInject, 'a chunk of a prompt');
  const { promptsApart = false, reuse = () => 0 } = given;
  expectBoolean('Scheduler', 'promptsApart', promptsApart);
  expectThat('Scheduler', 'promptsApart', promptsApart, !promptsApart || features.offload, 'false without offload');
  expectCallback('Scheduler', 'reuse', reuse);
  const settings = { ...limits, ...positive, ...counts, model, features, promptsApart, reuse };
  if (features.sparse) expectLeast('budgetTokens', budgetTokens, leastBudget(settings), 'sinks, window, the newest block and one to choose');
  return settings;
}

/** Tokens of the smallest budget: all pinned blocks, and one to choose. */
export function leastBudget(settings: Pick<Settings, 'blockTokens' | 'sinkTokens' | 'localWindow'>): number {
  return (pinnedBlocks(settings) + 1) * settings.blockTokens;
}

/** Blocks of a kv head that every step reads and that never leave the device: sinks, window, and the one that is not full. */
export function pinnedBlocks({ blockTokens, sinkTokens, localWindow }: Pick<Settings, 'blockTokens' | 'sinkTokens' | 'localWindow'>): number {
  return Math.ceil(sinkTokens / blockTokens) + Math.ceil(localWindow / blockTokens) + 1;
}

function readFeatures(given: Partial<Features> = {}): Features {
  expectObject('Scheduler', 'features', given);
  const { sparse = true, offload = sparse, workingSetControl = offload, layerSegments = true } = given;
  const features = { sparse, offload, workingSetControl, layerSegments };
  for (const name of featureNames) expectBoolean('Scheduler', name, features[name]);
  for (const [feature, wanted] of foundations) {
    if (!features[feature] || features[wanted]) continue;
    throw new InvalidValueError(`Scheduler: ${feature} is on and ${wanted} is off, which it stands on. Switch both on, or both off.`, {
      subject: feature,
      given: features[feature],
      wanted: features[wanted],
    });
  }
  return features;
}

function readShape(given: ModelShape): ModelShape {
  expectObject('Scheduler', 'model', given);
  const { layers, kvHeads, headDim, hiddenSize } = given;
  const shape = { layers, kvHeads, headDim, hiddenSize };
  for (const [name, count] of Object.entries(shape)) expectCount(name, count, 1);
  return shape;
}

/** @throws InvalidValueError unless it is a whole number from `least` to what an i32 holds */
export function expectCount(name: string, given: number, least: number): void {
  if (Number.isInteger(given) && given >= least && given <= mostCount) return;
  throw new InvalidValueError(`Scheduler: ${name} is ${show(given)}; it must be a whole number from ${least} to ${mostCount}.`, {
    subject: name,
    given,
    wanted: [least, mostCount],
  });
}

export function expectLeast(name: string, given: number, least: number, what: string): void {
  if (given >= least) return;
  throw new InvalidValueError(`Scheduler: ${name} is ${given}; ${what} takes ${least}. Give more, or make the others smaller.`, {
    subject: name,
    given,
    wanted: least,
  });
}
