import { InvalidValueError, ShapeError, type Stream, type TensorHandle } from '@kv/sparse-core';
import { batchRules, expectShape, expectThat, loadAddon, operation } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';
import { expectRanges, rangesRule, type ScoreRanges } from './key-scores.js';

/**
 * What becomes of the share of attention that falls on tokens which a head did not take. `renormalise`: weights sum to 1
 * over the taken. `paper`: it counts as zero. `meanValue`: it is the weight of the mean value.
 */
export type MissingMass = 'renormalise' | 'paper' | 'meanValue';

const missingMasses: readonly MissingMass[] = ['renormalise', 'paper', 'meanValue'];

export interface SelectByMassArguments {
  /** f32: scaled scores of each row's slot. `key` is at least as long as the slots of all rows, at most 2^24. */
  readonly scores: TensorHandle<'f32', readonly ['token', 'queryHead', 'key']>;
  /**
   * f32: of keys that are elsewhere and are read anyway, the natural logarithm of the softmax's denominator. They count
   * first. Default: there are none.
   */
  readonly denseLogSumExp?: TensorHandle<'f32', readonly ['token', 'queryHead']> | undefined;
  /** i32: the numbers of each kv head's blocks of values, of 64 tokens. */
  readonly blockTable: TensorHandle<'i32', readonly ['slot', 'kvHead', 'block']>;
  /** i32: how many tokens with scores each kv head of each slot holds. */
  readonly keyCounts: TensorHandle<'i32', readonly ['slot', 'kvHead']>;
  /** i32 `[batch]`: the slot that entry `b` belongs to. */
  readonly slots: TensorHandle<'i32', readonly ['batch']>;
  /** i32 `[batch + 1]`, ascending: entry `b` owns rows `queryStart[b] .. queryStart[b + 1] - 1`. */
  readonly queryStart: TensorHandle<'i32', readonly ['boundary']>;
  /** Blocks of the pool of values. */
  readonly valueBlocks: number;
  /** bf16: weights are multiplied by the scale of their value. Default: 1. */
  readonly valueScales?: TensorHandle<'bf16', readonly ['valueBlock', 'blockToken']> | undefined;
  /** i32, with `meanValue`: the row of the pool that holds the head's mean value; below 0 for none. */
  readonly meanRows?: TensorHandle<'i32', readonly ['slot', 'kvHead']> | undefined;
  /** The share of each head's attention that its tokens reach: above 0, at most 1, which takes all. */
  readonly tau: number;
  /** Default: `renormalise`. */
  readonly missingMass?: MissingMass | undefined;
  /**
   * i32: the first `counts` of each list are rows of the pool of values, `64 block + token % 64`, in ascending order of
   * tokens, and behind them, with `meanValue`, the row of `meanRows`. `chosen` is how many a list has room for: if the
   * heads took more, those of the largest weights stay. May be in host memory.
   */
  readonly valueRows: TensorHandle<'i32', readonly ['token', 'kvHead', 'chosen']>;
  /**
   * f32: 0 where a head did not take the token. May be in host memory. Left out, lists alone are written, as
   * `decodeAttentionListed` takes them.
   */
  readonly weights?: TensorHandle<'f32', readonly ['token', 'kvHead', 'chosen', 'groupHead']> | undefined;
  /** i32: 0 for rows that no batch entry has. May be in host memory. */
  readonly counts: TensorHandle<'i32', readonly ['token', 'kvHead']>;
  /** f32: the logarithm of what the weights were divided by, for `mergeAttention`. */
  readonly logSumExp: TensorHandle<'f32', readonly ['token', 'queryHead']>;
  /** As `codedKeyScores` wrote them of the same scores. Default: they are found. */
  readonly ranges?: ScoreRanges | undefined;
}

/** In the order of `native/bindings/select-by-mass.binding.cc`. */
const rules = [
  { name: 'scores', dtype: ['f32'], shape: ['token', 'queryHead', 'key'], layout: 'contiguous' },
  { name: 'denseLogSumExp', dtype: ['f32'], shape: ['token', 'queryHead'], layout: 'contiguous', optional: true },
  { name: 'blockTable', dtype: ['i32'], shape: ['slot', 'kvHead', 'tableBlock'], layout: 'contiguous' },
  { name: 'keyCounts', dtype: ['i32'], shape: ['slot', 'kvHead'], layout: 'contiguous' },
  ...batchRules,
  { name: 'valueScales', dtype: ['bf16'], shape: ['valueBlock', blockTokens], layout: 'contiguous', optional: true },
  { name: 'meanRows', dtype: ['i32'], shape: ['slot', 'kvHead'], layout: 'contiguous', optional: true },
  { name: 'valueRows', dtype: ['i32'], shape: ['token', 'kvHead', 'chosen'], layout: 'contiguous' },
  { name: 'weights', dtype: ['f32'], shape: ['token', 'kvHead', 'chosen', 'groupHead'], layout: 'contiguous', optional: true },
  { name: 'counts', dtype: ['i32'], shape: ['token', 'kvHead'], layout: 'contiguous' },
  { name: 'logSumExp', dtype: ['f32'], shape: ['token', 'queryHead'], layout: 'contiguous' },
  rangesRule,
] as const;

const enqueue = operation('selectByMass', rules, ['valueRows', 'weights', 'counts', 'logSumExp']);

/**
 * Chooses the tokens of which the values are read (HCAttention Eq. 3, 4). With `s` a head's scores and `d` its
 * `denseLogSumExp`, each query head takes the fewest tokens, by descending score, of equal scores the lower one, with
 * `e^d + sum of e^s over the taken >= tau (e^d + sum of e^s over all)`. A kv head's list is the union of its query
 * heads'. `weights` are `e^(s - logSumExp)`. A token whose score is 26 or more below the largest counts as nothing. A NaN,
 * or a score of plus infinity, makes `logSumExp` NaN for its row and head alone, which takes no token. Every device
 * chooses the same tokens.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError for a tau outside of (0, 1], another `missingMass`, or `meanRows` without `meanValue` and the
 * other way round, or scales or means without weights; counts, slots and tables that lead outside reject the stream's next wait with one
 * @throws CapabilityError for scores of more than 2^24 tokens
 */
export function selectByMass(stream: Stream, args: SelectByMassArguments): void {
  enqueue(stream, args, (natives, [scores, , , keyCounts, , , valueScales, meanRows, valueRows, weights]) => {
    const name = 'selectByMass';
    const { tau, missingMass = 'renormalise', valueBlocks } = args;
    const [, queryHeads] = scores.shape;
    const [, kvHeads] = keyCounts.shape;
    const group = weights === undefined ? Math.floor(queryHeads / kvHeads) : weights.shape[3];
    if (queryHeads !== kvHeads * group || valueRows.shape[2] === 0) {
      throw new ShapeError(
        `${name}: there are scores of ${queryHeads} query heads, ${kvHeads} kv heads with weights of ${group} query heads ` +
          `each, and room for ${valueRows.shape[2]} tokens; give weights of as many query heads as have scores, and room for a token.`,
        { subject: 'weights', given: weights?.shape ?? scores.shape },
      );
    }
    if (weights === undefined && (valueScales ?? meanRows) !== undefined) {
      throw new InvalidValueError(`${name}: valueScales and meanRows go into weights, and there are none; give weights, or leave both out.`, {
        subject: 'weights',
        given: weights,
      });
    }
    expectRanges(name, args.ranges);
    expectThat(name, 'tau', tau, typeof tau === 'number' && tau > 0 && tau <= 1, 'a number above 0, at most 1');
    expectThat(name, 'missingMass', missingMass, missingMasses.includes(missingMass), `one of ${missingMasses.join(', ')}`);
    const isCount = Number.isInteger(valueBlocks) && valueBlocks >= 0 && valueBlocks <= 2 ** 25;
    expectThat(name, 'valueBlocks', valueBlocks, isCount, 'a number of blocks, at most 2^25');
    if (valueScales !== undefined) expectShape(name, 'valueScales', valueScales, [valueBlocks, blockTokens]);
    if ((missingMass === 'meanValue') !== (meanRows !== undefined)) {
      throw new InvalidValueError(`${name}: meanRows belong to a missingMass of meanValue; give both or neither.`, {
        subject: 'meanRows',
        given: missingMass,
      });
    }
    loadAddon().selectByMass(stream.native, ...natives, valueBlocks, tau, missingMasses.indexOf(missingMass));
  });
}
