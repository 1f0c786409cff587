import { createRowBatch, type KvStore, type PrefillAttention, type Stream } from '@kv/sparse-core';
import { encode, Random } from '@kv/sparse-core/testing';

export interface Reading {
  /** Rows of a prompt's chunks. */
  readonly chunks: readonly number[];
  /** Two sequences in one batch, or one after the other. */
  readonly batched: boolean;
  /** Whether the steps of answers are recorded and replayed. Default: no. */
  readonly recorded?: boolean | undefined;
  /** Whether all that answers see is in windows, and they are told so. Default: no. */
  readonly dense?: boolean | undefined;
  /** Default: 2. */
  readonly kvHeads?: number | undefined;
}

/**
 * Reads given keys and values of two sequences, kv heads of 64 dims and two query heads each, in chunks, then answers three
 * tokens; gives the bits of these. Disposes of the store.
 */
export async function answersOf(stream: Stream, store: KvStore, prefill: PrefillAttention, { chunks, batched, recorded = false, dense = false, kvHeads = 2 }: Reading): Promise<number[][]> {
  const { device } = stream;
  const total = chunks.reduce((sum, rows) => sum + rows, 0);
  const dtype = device.kind === 'cuda' ? 'f16' : 'f32';
  const made = [5, 6].map((seed) => new Random(seed));
  const numbers = (width: number) => made.map((random) => new Float64Array((total + 3) * width).map(() => random.normal()));
  const width = kvHeads * 64;
  const [keyRows, valueRows, queries] = [numbers(width), numbers(width), numbers(2 * width)];
  const rowsOf = (from: readonly Float64Array[], of: readonly number[], width: number, position: number, rows: number) => {
    const all = new Float64Array(of.length * rows * width);
    of.forEach((each, index) => {
      all.set(from[each]?.subarray(position * width, (position + rows) * width) ?? [], index * rows * width);
    });
    return encode(dtype, all);
  };
  const results: number[][] = [[], []];
  const step = async (of: readonly number[], position: number, rows: number, answer: boolean) => {
    using batch = createRowBatch(device, stream, of.map((slot) => ({ slot, position, rows })));
    const rowTensor = (from: readonly Float64Array[]) =>
      device.tensor(dtype, ['token', 'kvHead', 'dim'], [of.length * rows, kvHeads, 64], rowsOf(from, of, width, position, rows));
    const axes = ['token', 'queryHead', 'dim'] as const;
    const shape = [of.length * rows, 2 * kvHeads, 64] as const;
    using query = device.tensor(dtype, axes, shape, rowsOf(queries, of, 2 * width, position, rows));
    using output = device.tensor(dtype, axes, shape);
    using keys = rowTensor(keyRows);
    using values = rowTensor(valueRows);
    store.prepare(stream, batch);
    const call = { batch, keys, values };
    const enqueue = () => {
      store.append(stream, call);
      const attention = { batch, query, output, scale: 0.125 };
      if (answer && dense) store.decodeDense?.(stream, attention);
      else if (answer) store.startDecode(stream, attention)();
    };
    if (answer && recorded) {
      using recording = stream.record(enqueue);
      stream.replay(recording);
    } else enqueue();
    store.advance(batch);
    const rest = { state: undefined, endsPrompt: of.map(() => false), rope: undefined as never, query, output, scale: 0.125 };
    if (!answer) prefill.attend(stream, { ...call, ...rest, store });
    const bits = await output.read(stream);
    if (answer) of.forEach((each, index) => results[each]?.push(...bits.subarray(index * 2 * width, (index + 1) * 2 * width)));
  };
  for (const of of batched ? [[0, 1]] : [[0], [1]]) {
    let position = 0;
    for (const rows of chunks) {
      await step(of, position, rows, false);
      position += rows;
    }
    for (const slot of of) store.finishPrefill?.(stream, slot);
    for (const next of [0, 1, 2]) await step(of, position + next, 1, true);
  }
  store.dispose();
  return results;
}
