import { prefill } from '@kv/model';
import type { BatchEntry, Runner, Sequence } from '@kv/model';
import { KvError, OutOfMemoryError } from '@kv/sparse-core';
import type { KvSelector } from '@kv/sparse-core';
import type { Random } from '@kv/sparse-core/testing';
import { expect } from 'vitest';

/** What a sequence should hold, beside the sequence. */
export interface Expected {
  readonly sequence: Sequence;
  readonly ids: number[];
  /** Where the newest answer begins. */
  promptEnd: number;
  /** It was fed a token that is none: whatever comes of it is NaN. */
  broken: boolean;
  /** Its selector fails at the end of a prompt. */
  readonly failing: boolean;
}

/** A runner, its sequences, and a plain model of what each should hold. */
export class SequenceWorld {
  readonly runner: Runner;
  readonly random: Random;
  /** Whether the policy drops no token. */
  readonly keepsAll: boolean;
  /** Whether its prompts are dense when they end, so that a selector can observe them. */
  readonly canSelect: boolean;
  readonly all = new Set<Expected>();
  /** How often each operation ended in each way. */
  readonly outcomes = new Map<string, number>();
  readonly #vocabulary: number;

  constructor(runner: Runner, random: Random, { keepsAll, canSelect }: Pick<SequenceWorld, 'keepsAll' | 'canSelect'>) {
    this.runner = runner;
    this.random = random;
    this.keepsAll = keepsAll;
    this.canSelect = canSelect;
    this.#vocabulary = runner.model.config.vocabularySize;
  }

  count(operation: string, outcome: string): void {
    const name = `${operation}: ${outcome}`;
    this.outcomes.set(name, (this.outcomes.get(name) ?? 0) + 1);
  }

  token(): number {
    return this.random.integer(3, this.#vocabulary - 1);
  }

  tokens(most: number): number[] {
    return Array.from({ length: this.random.integer(1, Math.max(1, most)) }, () => this.token());
  }

  pick(): Expected | undefined {
    return this.all.size === 0 ? undefined : this.random.pick([...this.all]);
  }

  room({ ids }: Expected): number {
    return this.runner.contextTokens - ids.length;
  }

  add(sequence: Sequence, from: Partial<Expected> & { readonly ids: readonly number[] }): Expected {
    const { promptEnd = 0, broken = false, failing = false } = from;
    const added = { sequence, ids: [...from.ids], promptEnd, broken, failing };
    this.all.add(added);
    return added;
  }

  remove(one: Expected): void {
    one.sequence.dispose();
    this.all.delete(one);
  }

  /** Every sequence holds what it should, and has not ended but by its own selection, whose failure may show later. */
  expectHolds(): void {
    for (const one of this.all) {
      const { sequence, ids, failing } = one;
      if (failing && sequence.failure) {
        this.remove(one);
        continue;
      }
      expect(sequence.disposed).toBe(false);
      expect(sequence.length).toBe(ids.length);
      expect([...sequence.ids]).toEqual(ids);
    }
  }

  /**
   * What a call may end with that changes nothing, or ends the sequences that it names.
   * @param touched those that the call was about
   */
  async attempt(operation: string, touched: readonly Expected[], call: () => Promise<void>): Promise<void> {
    try {
      await call();
      this.count(operation, 'done');
    } catch (error) {
      if (!(error instanceof KvError)) throw error;
      this.count(operation, error.name);
      const ended = touched.filter(({ sequence }) => sequence.disposed);
      if (ended.length === 0) expect(error).toBeInstanceOf(OutOfMemoryError);
    }
    // Only where that was asked for, or the cache had no room to select in.
    for (const one of touched) {
      if (!one.sequence.disposed) continue;
      const { failure } = one.sequence;
      if (!one.failing) expect(failure).toBeInstanceOf(OutOfMemoryError);
      expect(failure).toBeDefined();
      this.all.delete(one);
    }
  }

  /** Steps several sequences at once, and counts their tokens. */
  async step(entries: readonly { readonly one: Expected; readonly ids: readonly number[]; readonly phase: BatchEntry['phase'] }[]): Promise<Float32Array[]> {
    const { device } = this.runner.model;
    const made: Disposable[] = [];
    const given = entries.map(({ one: { sequence }, ids, phase }): BatchEntry => {
      if (this.random.next() < 0.5 && ids.every((id) => id >= 0)) return { sequence, ids, phase };
      const onDevice = device.tensor('i32', ['token'], [ids.length], Int32Array.from(ids));
      made.push(onDevice);
      return { sequence, ids: onDevice, phase };
    });
    try {
      using logits = await this.runner.step(given);
      const values = await logits.read();
      for (const [index, { one, ids, phase }] of entries.entries()) {
        if (one.sequence.disposed) continue;
        if ('dtype' in (given[index]?.ids ?? [])) one.sequence.setIds(one.ids.length, ids);
        one.ids.push(...ids);
        if (phase !== 'decode') one.promptEnd = one.ids.length;
        if (ids.some((id) => id < 0)) one.broken = true;
      }
      return entries.map((_, row) => values.subarray(row * this.#vocabulary, (row + 1) * this.#vocabulary));
    } finally {
      for (const each of made) each[Symbol.dispose]();
    }
  }
}

/** A selector that fails in one of several ways in a layer. */
export function failingSelector(random: Random): KvSelector {
  const way = random.integer(0, 3);
  const failingLayer = random.integer(0, 3);
  return {
    name: 'failing',
    observationWindow: 4,
    select(stream, { store: { layer } }) {
      if (layer.index !== failingLayer) return undefined;
      if (way === 0) throw new KvError('KV_INVALID_VALUE', 'failing on purpose');
      if (way === 1) return Promise.reject(new KvError('KV_INVALID_VALUE', 'failing on purpose, later'));
      const rows = Array.from({ length: layer.kvHeads }, () => (way === 2 ? [1, 0] : [0, 100_000])).flat();
      const indices = stream.device.tensor('i32', ['kvHead', 'kept'], [layer.kvHeads, 2], Int32Array.from(rows));
      return { indices, counts: new Array<number>(layer.kvHeads).fill(2) };
    },
  };
}

/** The logits of one more token behind a sequence, and behind a fresh one that reads its tokens at once. */
export async function besideFresh(world: SequenceWorld, one: Expected, fresh: Runner): Promise<[Float32Array, Float32Array]> {
  using other = fresh.openSequence();
  (await prefill(fresh, other, one.ids)).dispose();
  const id = world.token();
  const [ours = new Float32Array()] = await world.step([{ one, ids: [id], phase: 'decode' }]);
  using logits = await fresh.step([{ sequence: other, ids: [id], phase: 'decode' }]);
  return [ours, await logits.read()];
}
