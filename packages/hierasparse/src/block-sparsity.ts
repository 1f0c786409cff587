import { InvalidValueError } from '@kv/sparse-core';
import { expectObject, expectThat, type OptionNames, show } from '@kv/sparse-core/native';
import type { KvOperand } from './blocks-24.js';

/** Share of the blocks that are sparse, 0 to 1, of all layers or of each. */
export type LayerSparsity = number | ((layer: number) => number);

/** The paper's S_K and S_V. What is left out stays dense. */
export interface BlockSparsity {
  /** S_K. Default: 0, all dense. */
  readonly keys?: LayerSparsity | undefined;
  /** S_V. Default: 0, all dense. */
  readonly values?: LayerSparsity | undefined;
}

export const sparsityOptions: OptionNames<BlockSparsity> = { keys: true, values: true };

/** S_K and S_V of one layer. */
export type Shares = Readonly<Record<KvOperand, number>>;

export const allDense: Shares = { keys: 0, values: 0 };

/** The shares of one layer. @throws InvalidValueError when one is not between 0 and 1 */
export function sharesOf(sparsity: BlockSparsity, layer: number): Shares {
  expectObject('hierasparse', 'options', sparsity);
  // An array has `keys` and `values` of its own.
  expectThat('hierasparse', 'options', sparsity, !Array.isArray(sparsity), 'an object with shares');
  const share = (operand: KvOperand) => {
    const { [operand]: given = 0 } = sparsity;
    const value = typeof given === 'function' ? given(layer) : given;
    if (typeof value !== 'number' || !(value >= 0 && value <= 1)) {
      throw new InvalidValueError(
        `The sparsity of ${operand} is ${show(value)} in layer ${layer}; it must be a share of the blocks, 0 to 1.`,
        { subject: operand, given: value, wanted: [0, 1] },
      );
    }
    return value;
  };
  return { keys: share('keys'), values: share('values') };
}

export function anySparse({ keys, values }: Shares): boolean {
  return keys > 0 || values > 0;
}

/** Such as `hierasparse S_K=0.5 S_V=1`; what is dense is not named. */
export function nameOf({ keys = 0, values = 0 }: BlockSparsity): string {
  const part = (symbol: string, share: LayerSparsity) => {
    if (share === 0) return '';
    return typeof share === 'number' ? ` ${symbol}=${share}` : ` ${symbol} by layer`;
  };
  return `hierasparse${part('S_K', keys)}${part('S_V', values)}`;
}
