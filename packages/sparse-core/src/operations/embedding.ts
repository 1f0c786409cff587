import type { FloatDType } from '../dtype.js';
import { loadAddon } from '../load-addon.js';
import type { Stream } from '../stream.js';
import type { TensorHandle } from '../tensor.js';
import { expectContiguousRows, expectDType, expectShape, nativeOf } from '../validate.js';

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
  readonly outside?: 'fail' | 'nan';
}

/**
 * Copies rows of a table by their numbers: `output[t] = table[ids[t]]`.
 * An id that the table does not have fails the stream with an InvalidValueError, unless `outside` says otherwise.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 */
export function embedding<D extends FloatDType, Token extends string, Feature extends string>(
  stream: Stream,
  args: EmbeddingArguments<D, Token, Feature>,
): void {
  const { table, ids, output, outside = 'fail' } = args;
  const native = {
    table: nativeOf('embedding', 'table', table, stream).native,
    ids: nativeOf('embedding', 'ids', ids, stream).native,
    output: nativeOf('embedding', 'output', output, stream),
  };
  expectDType('embedding', 'table', table, ['f32', 'f16', 'bf16']);
  expectDType('embedding', 'ids', ids, ['i32', 'u32']);
  expectDType('embedding', 'output', output, ['f32', table.dtype]);
  expectShape('embedding', 'table', table, [undefined, undefined]);
  expectShape('embedding', 'ids', ids, [undefined]);
  expectShape('embedding', 'output', output, [ids.shape[0], table.shape[1]]);
  for (const [name, tensor] of Object.entries({ table, ids, output })) {
    expectContiguousRows('embedding', name, tensor);
  }
  loadAddon().embedding(stream.native, native.table, native.ids, native.output.native, outside === 'nan');
  native.output.writtenBy(stream);
}
