import { CapabilityError, densePrefill, kvPolicy } from '@kv/sparse-core';
import type { KvLayer, PrefillAttention, PrefillState } from '@kv/sparse-core';
import { liveBytes } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import { goldenModel } from '../testing/golden.js';
import { withRunner } from '../testing/run-model.js';
import { describeOnEachKind } from '../testing/test-devices.js';
import type { Phase } from './batch-entry.js';
import type { Runner } from './runner.js';
import type { Sequence } from './sequence.js';

const bytesOfToken = 10;

/** Keeps the position behind the newest row of each slot's prompt, and frees a device tensor when it is disposed. */
class Positions implements PrefillState {
  readonly ends = new Map<number, number>();
  readonly #tensor: Disposable;
  disposals = 0;

  constructor(tensor: Disposable) {
    this.#tensor = tensor;
  }

  copy(_stream: unknown, fromSlot: number, toSlot: number): void {
    expect(this.ends.has(toSlot)).toBe(false);
    const end = this.ends.get(fromSlot);
    if (end !== undefined) this.ends.set(toSlot, end);
  }

  release(_stream: unknown, slot: number): void {
    this.ends.delete(slot);
  }

  bytes() {
    return { device: bytesOfToken * [...this.ends.values()].reduce((sum, end) => sum + end, 0), host: 1 };
  }

  dispose(): void {
    this.disposals += 1;
    this.#tensor[Symbol.dispose]();
  }
}

/** Dense attention that checks that its state holds exactly what came before each chunk. */
function counting() {
  const dense = densePrefill();
  const opened: { layer: KvLayer; state: Positions }[] = [];
  const ended: (readonly boolean[])[] = [];
  const prefill: PrefillAttention & Required<Pick<PrefillAttention, 'open'>> = {
    name: 'counting',
    open(layer, { device }) {
      const state = new Positions(device.tensor('f32', ['value'], [100]));
      opened.push({ layer, state });
      return state;
    },
    attend(stream, call) {
      const state = opened.find((each) => each.layer.index === call.store.layer.index)?.state;
      expect(call.state).toBe(state);
      if (call.store.layer.index === 0) ended.push(call.endsPrompt);
      call.batch.entries.forEach(({ slot, position, rows }, entry) => {
        expect(state?.ends.get(slot) ?? 0).toBe(position);
        if (call.endsPrompt[entry] === true) state?.ends.delete(slot);
        else state?.ends.set(slot, position + rows);
      });
      return dense.attend(stream, call);
    },
  };
  return { prefill, opened, ended };
}

async function step(runner: Runner, ...entries: [Sequence, number, Phase][]): Promise<void> {
  const given = entries.map(([sequence, tokens, phase]) => ({ sequence, ids: new Int32Array(tokens).fill(7), phase }));
  (await runner.step(given)).dispose();
}

describeOnEachKind('what a prefill attention keeps between chunks', (kind) => {
  it('is opened for each layer, counted, copied by a fork, and released with a sequence', async () => {
    const { prefill, opened, ended } = counting();
    const policy = kvPolicy({ prefill });
    await withRunner(goldenModel('mistral'), { kind, sequences: 3, contextTokens: 64, policy }, async (runner, model) => {
      const { layers } = model.config;
      expect(opened.map(({ layer }) => layer.index)).toEqual(Array.from({ length: layers }, (_, index) => index));
      const kept = (): Record<number, number>[] => opened.map(({ state }) => Object.fromEntries(state.ends));
      const all = (slots: Record<number, number>): Record<number, number>[] => opened.map(() => slots);
      const [first, second] = [runner.openSequence(), runner.openSequence()];
      const empty = runner.kvBytes;
      expect(empty).toEqual({ device: 0, host: layers });

      await step(runner, [first, 5, 'prefill'], [second, 3, 'prefill']);
      expect(kept()).toEqual(all({ [first.slot]: 5, [second.slot]: 3 }));
      const { device } = runner.kvBytes;
      await step(runner, [second, 1, 'prefill-end']);
      expect(kept()).toEqual(all({ [first.slot]: 5 }));
      // The cache's blocks are the same.
      expect(runner.kvBytes.device).toBe(device - layers * 3 * bytesOfToken);

      expect(() => runner.fork(first, { tokens: 4 })).toThrow(CapabilityError);
      expect(kept()).toEqual(all({ [first.slot]: 5 }));
      const fork = runner.fork(first);
      expect(kept()).toEqual(all({ [first.slot]: 5, [fork.slot]: 5 }));
      await step(runner, [fork, 2, 'prefill'], [first, 4, 'prefill-end']);
      expect(kept()).toEqual(all({ [fork.slot]: 7 }));
      expect(ended).toEqual([[false, false], [true], [false, true]]);

      fork.dispose();
      expect(kept()).toEqual(all({}));
      const next = runner.openSequence();
      expect(next.slot).toBe(fork.slot);
      await step(runner, [next, 6, 'prefill']);
      expect(kept()).toEqual(all({ [next.slot]: 6 }));
      for (const sequence of [first, second, next]) sequence.dispose();
      expect(runner.kvBytes).toEqual(empty);
    });
    expect(opened.map(({ state }) => state.disposals)).toEqual(opened.map(() => 1));
  });

  it('leaves nothing behind when a later layer has no room for it', async () => {
    const { prefill, opened } = counting();
    const failing: PrefillAttention = {
      ...prefill,
      open(layer, capacity) {
        if (layer.index === 1) throw new Error('no room, on purpose');
        return prefill.open(layer, capacity);
      },
    };
    await withRunner(goldenModel('mistral'), { kind, contextTokens: 64 }, async (_runner, model) => {
      const { device } = model;
      const before = device.memory().live;
      expect(() => model.createRunner({ contextTokens: 64, policy: kvPolicy({ prefill: failing }) })).toThrow('on purpose');
      expect(await liveBytes(device, before)).toBe(before);
      expect(opened.map(({ state }) => state.disposals)).toEqual([1]);
    });
  });
});
