import type { TensorHandle } from '@kv/sparse-core';
import { expectObject, expectThat, isFinite32 } from '@kv/sparse-core/native';

/** Tokens of a block of keys. */
export const keyBlockTokens = 64;

/** Which blocks a tile takes besides those that it always takes: exactly one rule is given. */
export type BlockThreshold = OneOf<BlockRules>;

/** The rules that an estimate of any kind allows. The others need scores. */
export type EstimateThreshold = Extract<BlockThreshold, { readonly epsilon: number } | { readonly budget: number }>;

export interface BlockRules {
  /** Blocks with a score of ln(`epsilon * 64 / tokens`) or more: from 0 on, which takes all. */
  readonly epsilon: number;
  /**
   * The best blocks of all heads, so that with those that are always taken they are as large a share of all blocks: above
   * 0 up to 1.
   */
  readonly budget: number;
  /**
   * Of each tile the best blocks, as few as hold this share of its estimated attention with those that are always taken:
   * between 0 and 1. The rule of XAttention.
   */
  readonly mass: number;
  /** Blocks whose estimated attention is at least so many times that of the tile's best: above 0 up to 1. That of FlashPrefill. */
  readonly ofMax: number;
}

/** A budget that only the device knows. */
export interface TileBlocks {
  /**
   * i32 `[queryHead, queryTile]`, of one tile: how many blocks it took. Of all heads together, tiles take as many on
   * average, the best ones, but for those of `denseRows`, which take every block.
   */
  readonly tileBlocks: TensorHandle<'i32', readonly ['queryHead', 'queryTile']>;
}

type OneOf<Rules> = {
  [Rule in keyof Rules]: Readonly<Pick<Rules, Rule> & Partial<Record<Exclude<keyof Rules, Rule>, undefined>>>;
}[keyof Rules];

/** In the order of `BlockRule` in the operation's header. */
export const blockRules = ['epsilon', 'budget', 'mass', 'ofMax'] as const;

const thresholdRules = [...blockRules, 'tileBlocks'] as const;
type ThresholdRule = (typeof thresholdRules)[number];

/** Those of any estimate. */
export const estimateRules: readonly (keyof BlockRules)[] = ['epsilon', 'budget'];

const ranges = {
  epsilon: { holds: (value: number) => value >= 0, wanted: 'a number from 0 on' },
  budget: { holds: (value: number) => value > 0 && value <= 1, wanted: 'above 0 up to 1' },
  mass: { holds: (value: number) => value > 0 && value < 1, wanted: 'between 0 and 1' },
  ofMax: { holds: (value: number) => value > 0 && value <= 1, wanted: 'above 0 up to 1' },
} as const;

/**
 * What the kernel reads: a rule, the logarithm that scores are compared with (τ_B of the paper), and a share.
 * @throws InvalidValueError
 */
export function expectThreshold(
  subject: string,
  given: BlockThreshold | TileBlocks,
  tokens: number,
  allowed: readonly ThresholdRule[] = blockRules,
): readonly [rule: number, threshold: number, share: number] {
  expectObject(subject, 'threshold', given);
  const rules: { readonly [Rule in ThresholdRule]?: (BlockRules & TileBlocks)[Rule] | undefined } = given;
  const [name, ...others] = thresholdRules.filter((rule) => rules[rule] !== undefined);
  const isOne = name !== undefined && others.length === 0 && allowed.includes(name);
  expectThat(subject, 'threshold', given, isOne, `exactly one of ${allowed.join(', ')}`);
  if (name === undefined || name === 'tileBlocks') return [blockRules.indexOf('budget'), 0, 1];
  const value = rules[name] ?? NaN;
  const { holds, wanted } = ranges[name];
  expectThat(subject, name, value, isFinite32(value) && holds(value), wanted);
  const compared = name === 'epsilon' ? (value * keyBlockTokens) / tokens : name === 'ofMax' ? value : 1;
  return [blockRules.indexOf(name), Math.log(compared), value];
}
