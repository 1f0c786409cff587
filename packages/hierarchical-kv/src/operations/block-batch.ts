import type { TensorHandle } from '@kv/sparse-core';
import { batchRules, expectThat } from '@kv/sparse-core/native';

/** Rows of sequences whose tokens lie in blocks of one kv head each. */
export interface BlockBatch {
  /** i32 `[slot, kvHead]`: tokens, the batch's rows included. */
  readonly keyCounts: TensorHandle<'i32', readonly ['slot', 'kvHead']>;
  /** i32 `[batch]`: the slot that entry `b` belongs to. */
  readonly slots: TensorHandle<'i32', readonly ['batch']>;
  /** i32 `[batch + 1]`, ascending: entry `b` owns rows `queryStart[b] .. queryStart[b + 1] - 1`. */
  readonly queryStart: TensorHandle<'i32', readonly ['boundary']>;
}

export type BlockTableHandle = TensorHandle<'i32', readonly ['slot', 'kvHead', 'block']>;

export const keyCountsRule = { name: 'keyCounts', dtype: ['i32'], shape: ['slot', 'kvHead'], layout: 'contiguous' } as const;

export const tableRule = { name: 'blockTable', dtype: ['i32'], shape: ['slot', 'kvHead', 'tableBlock'], layout: 'contiguous' } as const;

/** Of the batch, in the order of the bindings. */
export const blockBatchRules = [keyCountsRule, ...batchRules] as const;

/** What a step reads of every sequence, whatever the scores are. */
export interface FixedBlocks {
  /** Tokens of a block. */
  readonly blockTokens: number;
  /** The first blocks of a sequence. */
  readonly sinkBlocks: number;
  /** The last ones, the one that is not full among them: 1 or more. */
  readonly recentBlocks: number;
}

/** @throws InvalidValueError unless it is a number of tokens */
export function expectBlockTokens(operation: string, blockTokens: number): void {
  const isRight = Number.isInteger(blockTokens) && blockTokens >= 1 && blockTokens <= 2 ** 16;
  expectThat(operation, 'blockTokens', blockTokens, isRight, 'a whole number from 1 to 65536');
}

/** @throws InvalidValueError unless lists of so many blocks have room for them */
export function expectFixedBlocks(operation: string, { blockTokens, sinkBlocks, recentBlocks }: FixedBlocks, room: number): void {
  expectBlockTokens(operation, blockTokens);
  const isCount = (count: number, least: number) => Number.isInteger(count) && count >= least && count <= room;
  expectThat(operation, 'sinkBlocks', sinkBlocks, isCount(sinkBlocks, 0), `a whole number from 0 to ${room}, which a list has room for`);
  expectThat(operation, 'recentBlocks', recentBlocks, isCount(recentBlocks, 1), `a whole number from 1 to ${room}, which a list has room for`);
  const fixed = sinkBlocks + recentBlocks;
  expectThat(operation, 'sinkBlocks + recentBlocks', fixed, fixed <= room, `at most ${room}, which a list has room for`);
}

