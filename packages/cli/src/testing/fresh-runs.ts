import { observationScores } from '@kv/hbw-select';
import type { Phase, Runner, Sequence } from '@kv/model';
import type { KvSelector, SelectCall, Stream } from '@kv/sparse-core';
import { decode } from '@kv/sparse-core/testing';
import type { Random } from '@kv/sparse-core/testing';

/** What a layer's cache held, or was chosen from, when a prompt ended; the first index is the kv head. */
export interface Moment {
  readonly layer: number;
  /** `[kvHead][token * dim]`, in blocks of 64 tokens with zeros behind the last; none unless asked for. */
  readonly keys: readonly Float64Array[];
  readonly values: readonly Float64Array[];
  /** `[kvHead][token]` of the tokens before the window, and what was kept of all; none of a selector that keeps all. */
  readonly scores: readonly Float32Array[];
  readonly kept: readonly ReadonlySet<number>[];
}

/** Reads keys and values just before the prompt's end changes them. */
export function peek(moments: Moment[]): KvSelector {
  return {
    name: 'peek',
    observationWindow: 1,
    async select(_stream, { store, slot }) {
      const blocks = store.denseBlocks([slot]);
      if (blocks === undefined) throw new Error('keys are dense until a prompt ends');
      const [, kvHeads, width] = blocks.blockTable.shape;
      const table = await blocks.blockTable.read();
      const read = async (pool: typeof blocks.keys) => {
        const [, blockTokens, dim] = pool.shape;
        const numbers = decode(pool.dtype, await pool.read());
        return store.lengths(slot).map((length, head) => {
          const used = table.subarray((slot * kvHeads + head) * width).subarray(0, Math.ceil(length / blockTokens));
          const size = blockTokens * dim;
          return Float64Array.from([...used].flatMap((block) => [...numbers.subarray(block * size, (block + 1) * size)]));
        });
      };
      const [keys, values] = [await read(blocks.keys), await read(blocks.values)];
      moments.push({ layer: store.layer.index, keys, values, scores: [], kept: [] });
      return undefined;
    },
  };
}

/** The selector, of which the scores that it chooses by and what it chooses are noted. */
export function noting(selector: KvSelector, moments: Moment[]): KvSelector {
  return {
    ...selector,
    async select(stream, call) {
      const scores = await scoresOf(stream, call);
      const selection = await selector.select(stream, call);
      if (selection === undefined) throw new Error('the prompt is longer than the capacity');
      const width = selection.indices.shape[1];
      const indices = await selection.indices.read(stream);
      const kept = selection.counts.map((count, head) => new Set(indices.subarray(head * width, head * width + count)));
      moments.push({ layer: call.store.layer.index, keys: [], values: [], scores, kept });
      return selection;
    },
  };
}

async function scoresOf(stream: Stream, { store, slot, lastQueries, scale }: SelectCall): Promise<Float32Array[]> {
  const { device } = stream;
  const [rows] = lastQueries.shape;
  const lengths = store.lengths(slot);
  const prefix = Math.max(...lengths) - rows;
  const blocks = store.denseBlocks([slot]);
  if (blocks === undefined) throw new Error('keys are dense until a prompt ends');
  using scores = device.tensor('f32', ['batch', 'kvHead', 'token'], [1, lengths.length, prefix]);
  using slots = device.tensor('i32', ['batch'], [1], Int32Array.of(slot));
  using queryStart = device.tensor('i32', ['boundary'], [2], Int32Array.of(0, rows));
  observationScores(stream, { query: lastQueries, scores, blocks, slots, queryStart, scale });
  const all = await scores.read(stream);
  return lengths.map((_, head) => all.slice(head * prefix, (head + 1) * prefix));
}

/** How a prompt is cut, and what runs beside it. */
export interface Course {
  readonly chunks: readonly number[];
  readonly neighbour: Int32Array;
}

export function randomCourse(random: Random, tokens: number, vocabulary: number): Course {
  const size = random.pick([1, 3, 13, 64, 200]);
  const chunks = [];
  for (let left = tokens; left > 0; left -= chunks.at(-1) ?? left) {
    chunks.push(Math.min(left, random.integer(Math.ceil(size / 2), 2 * size)));
  }
  const neighbour = Int32Array.from({ length: random.pick([0, 100]) }, () => random.integer(3, vocabulary - 1));
  return { chunks, neighbour };
}

interface Entry {
  readonly sequence: Sequence;
  readonly ids: Int32Array;
  readonly phase: Phase;
}

/** The logits behind the prompt and behind each token of the answer that follows, one row after the other. */
export async function readAlong(
  runner: Runner,
  prompt: Int32Array,
  answer: readonly number[],
  { chunks, neighbour }: Course,
): Promise<Float32Array[]> {
  const { layers } = runner.model.config;
  using sequence = runner.openSequence();
  using other = runner.openSequence();
  const run = async (entries: readonly Entry[]): Promise<Float32Array> => {
    using batch = runner.createBatch(entries);
    runner.embed(batch);
    await runner.runLayers(batch, 0, layers);
    using logits = runner.head(batch, [entries.reduce((rows, { ids }) => rows + ids.length, 0) - 1]);
    return await logits.read();
  };
  const rows: Float32Array[] = [];
  let start = 0;
  for (const tokens of chunks) {
    const ids = prompt.subarray(start, start + tokens);
    start += tokens;
    const ends = start === prompt.length;
    const beside = neighbour.subarray(other.length, other.length + 7);
    const entry = { sequence, ids, phase: ends ? ('prefill-end' as const) : ('prefill' as const) };
    const logits = await run(beside.length > 0 ? [{ sequence: other, ids: beside, phase: 'prefill' }, entry] : [entry]);
    if (ends) rows.push(logits);
  }
  for (const id of answer) rows.push(await run([{ sequence, ids: Int32Array.of(id), phase: 'decode' }]));
  return rows;
}
