import type { Stream, TensorHandle } from '@kv/sparse-core';
import { expectThat, loadAddon, operation } from '@kv/sparse-core/native';

import { blockRules, type BlockThreshold, estimateRules, expectThreshold, keyBlockTokens, type TileBlocks } from '../block-threshold.js';
import { exactTokens, type ExactTokens, isWhole } from '../exact-tokens.js';

/** In the order of `SlashBound` in the operation's header. */
export const slashBounds = ['safe', 'paper'] as const;

/**
 * What is taken for the largest slash part of a block: its upper bound, or as the paper has it the mean of two maxima,
 * which some elements exceed.
 */
export type SlashBound = (typeof slashBounds)[number];

export interface SelectKeyBlocksOptions extends ExactTokens {
  readonly threshold: BlockThreshold | TileBlocks;
  /** Rows of a query tile: 64 or 128. Default: 128. */
  readonly tileRows?: number | undefined;
  /** Tiles with any of so many last rows take every block. Default: 0. */
  readonly denseRows?: number | undefined;
  /** Default: `safe`. */
  readonly slashBound?: SlashBound | undefined;
}

/** The parts of the last rows of a sequence, as `decomposeAttention` writes them. */
export interface SkeletonParts {
  /** f32 `[queryHead, lag]`, contiguous, as many lags as keys. */
  readonly slash: TensorHandle<'f32', readonly ['queryHead', 'lag']>;
  /** f32 `[queryHead, key]`, contiguous. */
  readonly vertical: TensorHandle<'f32', readonly ['queryHead', 'key']>;
  /** f32 `[queryHead, row]`, contiguous. */
  readonly horizontal: TensorHandle<'f32', readonly ['queryHead', 'row']>;
  readonly scores?: undefined;
  readonly tokens?: undefined;
  readonly rows?: undefined;
}

/** An estimate for each tile of the last rows of a sequence and each of its blocks. */
export interface BlockScores {
  /**
   * f32 `[queryHead, queryTile, keyBlock]`, contiguous: the natural logarithm of the share of the tile's attention that
   * falls on the block, comparable over blocks, tiles and heads. −∞ where nothing does, NaN where nothing is known.
   */
  readonly scores: TensorHandle<'f32', readonly ['queryHead', 'queryTile', 'keyBlock']>;
  /** Of the sequence, these rows included. */
  readonly tokens: number;
  readonly rows: number;
  readonly slash?: undefined;
  readonly vertical?: undefined;
  readonly horizontal?: undefined;
}

/** All scores are −∞: with an epsilon above 0, tiles take only what they always take. */
export interface NoEstimate {
  /** Of the sequence, these rows included. */
  readonly tokens: number;
  readonly rows: number;
  readonly scores?: undefined;
  readonly slash?: undefined;
  readonly vertical?: undefined;
  readonly horizontal?: undefined;
}

export type BlockEstimate = SkeletonParts | BlockScores | NoEstimate;

/** An estimate, and where the lists go. */
export type SelectKeyBlocksArguments = BlockEstimate & SelectKeyBlocksOptions & BlockLists;

export interface BlockLists {
  /**
   * i32 `[queryHead, queryTile, listedBlock]`, contiguous, with room for every block of the sequence: which blocks each tile
   * of consecutive rows takes, ascending, counted in 64 tokens from the sequence's start. What is behind a list is left.
   */
  readonly keyBlocks: TensorHandle<'i32', readonly ['queryHead', 'queryTile', 'listedBlock']>;
  /** i32 `[queryHead, queryTile]`, contiguous: how many blocks each list has. */
  readonly keyBlockCounts: TensorHandle<'i32', readonly ['queryHead', 'queryTile']>;
}

const parts = ['slash', 'vertical', 'horizontal'] as const;

const enqueue = operation(
  'selectKeyBlocks',
  [
    { name: 'slash', dtype: ['f32'], shape: ['queryHead', 'key'], layout: 'contiguous', optional: true },
    { name: 'vertical', dtype: ['f32'], shape: ['queryHead', 'key'], layout: 'contiguous', optional: true },
    { name: 'horizontal', dtype: ['f32'], shape: ['queryHead', 'row'], layout: 'contiguous', optional: true },
    { name: 'scores', dtype: ['f32'], shape: ['queryHead', 'queryTile', 'keyBlock'], layout: 'contiguous', optional: true },
    { name: 'keyBlocks', dtype: ['i32'], shape: ['queryHead', 'queryTile', 'listedBlock'], layout: 'contiguous' },
    { name: 'keyBlockCounts', dtype: ['i32'], shape: ['queryHead', 'queryTile'], layout: 'contiguous' },
    { name: 'threshold.tileBlocks', dtype: ['i32'], shape: ['queryHead', 1], layout: 'rows', optional: true },
  ],
  ['keyBlocks', 'keyBlockCounts'],
);

/**
 * Chooses the blocks of 64 keys that each tile of queries attends to, by an estimate of their attention, the same on every
 * device (Sparse Skeleton, section 3.3). Blocks of the sinks and of a tile's diagonal are always among them, and so are
 * those whose estimate is NaN.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function selectKeyBlocks(stream: Stream, args: SelectKeyBlocksArguments): void {
  enqueue(stream, args, (natives, [slash, , horizontal, scores, keyBlocks]) => {
    const given = parts.filter((part) => args[part] !== undefined);
    const isOne = given.length === 0 ? args.tokens !== undefined : given.length === 3 && scores === undefined;
    expect('the estimate', given, isOne, `scores, or ${parts.join(', ')}, or neither`);
    const { tileRows = 128, denseRows = 0, slashBound = 'safe' } = args;
    const { sinkTokens, diagonalTokens } = exactTokens('selectKeyBlocks', args, 2 ** 31 - 1);
    expect('tileRows', tileRows, tileRows === 64 || tileRows === 128, '64 or 128');
    expect('denseRows', denseRows, isCount(denseRows, 0), 'a whole number from 0 on');
    expectSlashBound('selectKeyBlocks', slashBound);
    const [tokens, rows] = [slash?.shape[1] ?? args.tokens ?? 0, horizontal?.shape[1] ?? args.rows ?? 0];
    expect('tokens', tokens, isCount(tokens, 1), 'a whole number from 1 on');
    expect('rows', rows, isCount(rows, 1) && rows <= tokens, `1 to ${tokens} rows, as many as there are keys at most`);
    const [[, tiles, room], blocks] = [keyBlocks.shape, Math.ceil(tokens / keyBlockTokens)];
    expect('the queryTile axis', tiles, tiles === Math.ceil(rows / tileRows), `${Math.ceil(rows / tileRows)} tiles`);
    expect('the listedBlock axis', room, room >= blocks, `${blocks} blocks or more`);
    if (scores) expect('the keyBlock axis', scores.shape[2], scores.shape[2] === blocks, `${blocks} blocks`);
    const settings = [tileRows, sinkTokens, diagonalTokens, denseRows, slashBounds.indexOf(slashBound)] as const;
    const allowed = [...(scores ? blockRules : estimateRules), 'tileBlocks'] as const;
    const threshold = expectThreshold('selectKeyBlocks', args.threshold, tokens, allowed);
    loadAddon().selectKeyBlocks(stream.native, ...natives, tokens, rows, ...settings, ...threshold);
  });
}

function isCount(given: number, lowest: number): boolean {
  return isWhole(given, lowest, 2 ** 31 - 1);
}

/** @throws InvalidValueError */
export function expectSlashBound(subject: string, given: SlashBound): void {
  expectThat(subject, 'slashBound', given, slashBounds.includes(given), slashBounds.join(' or '));
}

function expect(name: string, given: unknown, holds: boolean, wanted: string): void {
  expectThat('selectKeyBlocks', name, given, holds, wanted);
}
