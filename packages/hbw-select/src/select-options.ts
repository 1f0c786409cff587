import { expectObject, expectThat, listOf } from '@kv/sparse-core/native';
import { expectChoice, expectWhole } from './expect.js';

/** In the order of `ScorePooling` in the operation's header, after none. */
export const poolings = ['average', 'max'] as const;
const mostRounds = 16;

/** Over an odd number of scores around each token, as PyTorch pools with stride 1 and padding `tokens / 2`. */
export interface ScorePooling {
  readonly kind: (typeof poolings)[number];
  /** How many scores are pooled for each token; odd. */
  readonly tokens: number;
}

/** How tokens are chosen; the defaults are those of HBW-KV with the whole capacity in use. */
export interface SelectTokensOptions {
  /** Groups of each round: M of the paper. Default: `[1, 8]`. */
  readonly rounds?: readonly number[] | undefined;
  /**
   * `refill`: a round skips what earlier ones have taken. `union`: each round chooses alone, and what several
   * chose counts once, so that fewer blocks are kept. Default: `refill`.
   */
  readonly dedup?: 'refill' | 'union' | undefined;
  /** `fill`: the best single tokens make up what whole blocks leave of the capacity. Default: `fill`. */
  readonly remainder?: 'fill' | 'drop' | undefined;
  /** First tokens of the prefix that are always kept. Default: 0. */
  readonly sinkTokens?: number | undefined;
  /** Default: none. */
  readonly pooling?: ScorePooling | undefined;
}

/** @throws InvalidValueError */
export function expectSelectOptions(options: SelectTokensOptions): void {
  const { rounds, dedup = 'refill', remainder = 'fill', sinkTokens = 0, pooling } = options;
  if (rounds !== undefined) {
    const groups = listOf('select', 'rounds', rounds, mostRounds);
    expectThat('select', 'rounds', rounds, groups.length > 0, `1 to ${mostRounds} numbers of groups`);
    for (const each of groups) expectWhole('select', 'rounds', each, 1);
  }
  expectChoice('select', 'dedup', dedup, ['refill', 'union']);
  expectChoice('select', 'remainder', remainder, ['fill', 'drop']);
  expectWhole('select', 'sinkTokens', sinkTokens);
  if (pooling === undefined) return;
  expectObject('select', 'pooling', pooling);
  expectChoice('select', 'pooling.kind', pooling.kind, poolings);
  expectWhole('select', 'pooling.tokens', pooling.tokens, 1);
  expectThat('select', 'pooling.tokens', pooling.tokens, pooling.tokens % 2 === 1, 'odd');
}
