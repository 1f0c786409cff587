import type { FloatDType } from '../dtype.js';
import type { Stream, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { floats } from '../tensor-rules.js';
import { expectThat } from '../validate.js';

export interface EmbeddingArguments<D extends FloatDType, Token extends string, Feature extends string> {
  /** `[row, feature]`: the token embeddings of a model, or activations to choose rows from. */
  readonly table: TensorHandle<D, readonly [string, Feature]>;
  /** `[token]`, each from 0 to the table's rows - 1, see `outside`; repeats are welcome. */
  readonly ids: TensorHandle<'i32' | 'u32', readonly [Token]>;
  /** `[token, feature]`; f32 or the table's dtype. Not part of the table. */
  readonly output: TensorHandle<'f32' | D, readonly [Token, Feature]>;
  /**
   * What an id does that the table does not have: `fail` fails the stream, and nothing is written; `nan` makes its own
   * row NaN, for ids of which some may be no token, such as the -1 of `sample`. Default: `fail`.
   */
  readonly outside?: 'fail' | 'nan' | undefined;
}

const enqueue = operation(
  'embedding',
  [
    { name: 'table', dtype: floats, shape: ['row', 'feature'], layout: 'rows', longRows: true },
    { name: 'ids', dtype: ['i32', 'u32'], shape: ['token'], layout: 'rows' },
    { name: 'output', dtype: ['f32'], dtypeOf: 'table', shape: ['token', 'feature'], layout: 'rows' },
  ],
  ['output'],
);

/**
 * Copies rows of a table by their numbers: `output[t] = table[ids[t]]`.
 * An id that the table does not have fails the stream with an InvalidValueError, unless `outside` says otherwise.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function embedding<D extends FloatDType, Token extends string, Feature extends string>(
  stream: Stream,
  args: EmbeddingArguments<D, Token, Feature>,
): void {
  enqueue(stream, args, (natives) => {
    const { outside = 'fail' } = args;
    expectThat('embedding', 'outside', outside, ['fail', 'nan'].includes(outside), "'fail' or 'nan'");
    loadAddon().embedding(stream.native, ...natives, outside === 'nan');
  });
}
