import { getEventListeners } from 'node:events';

import { densePagedStore, densePrefill, DisposedError, InvalidValueError, kvPolicy, OutOfMemoryError } from '@kv/sparse-core';
import type { Device, KvStore, KvStoreFactory, PrefillAttention } from '@kv/sparse-core';
import { describeOnDeviceKinds, enqueuedFailure, enqueueFailure, eventually, liveBytes, Random } from '@kv/sparse-core/testing';
import { generateTokens, Model } from '@kv/model';
import type { GeneratedId } from '@kv/model';
import { afterAll, beforeAll, expect, it, vi } from 'vitest';

import { Scheduler } from '../scheduler/scheduler.js';
import { collect, needleModel, nextTurn, optionsOf, promptOf, text } from '../testing/engine-requests.js';
import { createEngine } from './engine.js';
import type { Engine } from './engine.js';
import type { EngineOptions } from './engine-options.js';
import type { EngineRequestOptions } from './engine-request.js';

const mostAborts = Number(process.env.KV_ENGINE_ABORTS ?? 40);

/** In layer 2 a prompt of 33 tokens fails its stream, and one of 34 becomes NaN. */
const failing: PrefillAttention = {
  name: 'sometimes failing',
  attend(stream, call) {
    const { store, batch, output } = call;
    const report = densePrefill().attend(stream, call);
    if (store.layer.index === 2 && batch.rows === 33) enqueueFailure(stream);
    if (store.layer.index === 2 && batch.rows === 34) {
      const [tokens, heads, dims] = output.shape;
      stream.write(output, new Float32Array(tokens * heads * dims).fill(NaN));
    }
    return report;
  },
};

const policy = kvPolicy({ store: densePagedStore({ dtype: 'f32', blockTokens: 16 }), prefill: failing });
const settings: EngineOptions = { policy, activations: 'f32', sequences: 32, contextTokens: 256, maxBatchRows: 256 };

/** A dense store whose steps have room for so many answers, and for none that has 240 tokens. */
function smallStore(mostAnswers: number): KvStoreFactory & { readonly refused: () => number } {
  const dense = densePagedStore({ dtype: 'f32', blockTokens: 16 });
  let refused = 0;
  return {
    name: 'small',
    refused: () => refused,
    create: (layers, capacity) =>
      dense.create(layers, capacity).map((store): KvStore => {
        const prepare: KvStore['prepare'] = (stream, batch) => {
          const answers = batch.entries.filter(({ rows }) => rows === 1);
          if (answers.length > mostAnswers || answers.some(({ position }) => position >= 240)) {
            refused += 1;
            throw new OutOfMemoryError('there is no room for this step');
          }
          store.prepare(stream, batch);
        };
        const bound = (name: string | symbol): unknown => {
          const value: unknown = Reflect.get(store, name, store);
          return typeof value === 'function' ? (value as () => unknown).bind(store) : value;
        };
        return new Proxy(store, { get: (_, name) => (name === 'prepare' ? prepare : bound(name)) });
      }),
  };
}

describeOnDeviceKinds('the engine', ({ open }) => {
  let device: Device;
  let model: Model;
  let live: number;
  /** What each request answers alone. */
  const alone: number[][] = [];

  beforeAll(async () => {
    device = open();
    model = await Model.open(needleModel, { device });
    ({ live } = device.memory());
    using runner = model.createRunner({ ...settings, sequences: 1 });
    for (let index = 0; index < 32; index++) {
      alone.push(await collect(generateTokens(runner, promptOf(index), optionsOf(index))));
    }
  });
  afterAll(() => {
    model.dispose();
  });

  const use = async (options: EngineOptions, body: (engine: Engine) => Promise<void>): Promise<void> => {
    const engine = createEngine(model, { ...settings, ...options });
    try {
      await body(engine);
    } finally {
      await engine.close();
    }
    expect(await liveBytes(device, live)).toBe(live);
  };

  const idle = async (engine: Engine): Promise<void> => {
    await eventually(() => engine.load.underWay + engine.load.waiting === 0);
    expect(engine.load).toEqual({ underWay: 0, waiting: 0 });
    expect(engine.runner.kvBytes).toEqual({ device: 0, host: 0 });
  };

  it.each([
    ['chunks', {}],
    ['layer segments', { layerSegments: true, maxInjectTokens: 700 }],
    ['chunks on eight sequences', { sequences: 8 }],
  ])('gives 32 requests at once the answers that each has alone, with prompts in %s', (_name, options) =>
    use(options, async (engine) => {
      const answers = Array.from({ length: 32 }, (_, index) => collect(engine.generateTokens(promptOf(index), optionsOf(index))));
      expect(engine.load.waiting).toBe(32);
      expect(await Promise.all(answers)).toEqual(alone);
      await idle(engine);
    }),
  );

  it('moves the rows of prompts that wait between their layers to host memory where the device lacks room', async () => {
    const dense = densePagedStore({ dtype: 'f32', blockTokens: 16 });
    let moved = 0;
    /** Slots of prompts that have passed some of the layers, and whose rows are on the device: there is room for one's. */
    const between = new Set<number>();
    const create: KvStoreFactory['create'] = (layers, capacity) =>
      dense.create(layers, capacity).map((store) => {
        const prepare = store.prepare.bind(store);
        store.prepare = (stream, batch) => {
          const [entry] = batch.entries;
          if (entry === undefined || entry.rows === 1) {
            prepare(stream, batch);
            return;
          }
          if ([...between].some((slot) => slot !== entry.slot)) throw new OutOfMemoryError('there is no room for this part');
          prepare(stream, batch);
          if (store.layer.index === layers.length - 1) between.delete(entry.slot);
          else between.add(entry.slot);
        };
        return store;
      });
    await use({ policy: kvPolicy({ store: { name: 'small', create } }), layerSegments: true, maxInjectTokens: 700 }, async (engine) => {
      const { runner } = engine;
      const moveToHost = runner.moveToHost.bind(runner);
      runner.moveToHost = (batch) => {
        moved += 1;
        for (const { sequence } of batch.entries) between.delete(sequence.slot);
        return moveToHost(batch);
      };
      const answers = Array.from({ length: 32 }, (_, index) => collect(engine.generateTokens(promptOf(index), optionsOf(index))));
      expect(await Promise.all(answers)).toEqual(alone);
      expect(moved).toBeGreaterThan(5);
      await idle(engine);
    });
  });

  it('computes answers in several steps where the cache has no room for all at once, and ends who has none alone', () => {
    const store = smallStore(3);
    return use({ policy: kvPolicy({ store }) }, async (engine) => {
      const answers = Array.from({ length: 8 }, (_, index) => collect(engine.generateTokens(promptOf(index), optionsOf(index))));
      const long = collect(engine.generateTokens(text.slice(0, 230), { endIds: [] }));
      await expect(long).rejects.toThrow(OutOfMemoryError);
      expect(await Promise.all(answers)).toEqual(alone.slice(0, 8));
      await idle(engine);
      expect(store.refused()).toBeGreaterThan(8);
    });
  });

  it('ends answers at their limits', () =>
    use({}, async (engine) => {
      const free = await collect(engine.generateTokens(promptOf(2), { maxTokens: 24, endIds: [] }));
      const end = free.findIndex((id) => id !== free[0]);
      expect(end).toBeGreaterThan(0);
      const tokens: GeneratedId[] = [];
      for await (const token of engine.generateTokens(promptOf(2), { endIds: free.slice(end, end + 1) })) tokens.push(token);
      expect(tokens.map(({ id }) => id)).toEqual(free.slice(0, end + 1));
      expect(tokens.map(({ finishReason }) => finishReason)).toEqual(tokens.map((_, index) => (index === end ? 'end' : null)));
      // 250 tokens leave room for six, and one that is not fed.
      const long = [];
      for await (const token of engine.generateTokens(text.slice(0, 250), { endIds: [] })) long.push(token.finishReason);
      expect(long).toEqual([null, null, null, null, null, null, 'length']);
    }));

  it.each([1, 2])('has room for an answer that fills the context, of %i sequences', (sequences) =>
    use({ sequences, cacheTokens: 256 }, async (engine) => {
      const answers = Array.from({ length: sequences }, () => collect(engine.generateTokens(text.slice(0, 250), { endIds: [] })));
      expect((await Promise.all(answers)).map(({ length }) => length)).toEqual(Array<number>(sequences).fill(7));
      await idle(engine);
      expect(() => engine.generateTokens(text.slice(0, 257), { maxTokens: 1 })).toThrow(InvalidValueError);
    }));

  it('answers with texts, up to a stop string', () =>
    use({}, async (engine) => {
      const texts = async (stop: string[]) => {
        const tokens = [];
        for await (const token of engine.generate(model.tokenizer, promptOf(2), { maxTokens: 24, endIds: [], stop })) tokens.push(token);
        return { text: tokens.map(({ text: each }) => each).join(''), reason: tokens.at(-1)?.finishReason };
      };
      const whole = await texts([]);
      expect(whole.reason).toBe('length');
      const stop = whole.text.slice(4, 7);
      expect(await texts([stop])).toEqual({ text: whole.text.slice(0, whole.text.indexOf(stop)), reason: 'stop' });
      await idle(engine);
      await expect(texts([''])).rejects.toThrow(InvalidValueError);
    }));

  it('gives back the memory of requests that are aborted or left at any stage, and others keep their answers', () =>
    use({ sequences: 6, layerSegments: true, maxInjectTokens: 512 }, async (engine) => {
      const random = new Random(3);
      const stages = { silent: 0, answering: 0, left: 0 };
      const stop = async (index: number): Promise<void> => {
        const controller = new AbortController();
        const answer = engine.generateTokens(promptOf(index % 32), { maxTokens: 40, endIds: [], signal: controller.signal });
        const tokens = index % 6;
        if (tokens === 0) {
          // A fast device may have answered before the abort.
          const first = answer.next().then(
            () => 'answered',
            (error: unknown) => {
              expect(error).toMatchObject({ message: 'enough' });
              return 'silent';
            },
          );
          // Some are aborted before anything can have come of them.
          for (let turns = index % 4 === 0 ? 0 : random.integer(1, 30); turns > 0; turns--) await nextTurn();
          controller.abort(new Error('enough'));
          if ((await first) === 'silent') stages.silent += 1;
          return;
        }
        for (let taken = 0; taken < tokens; taken++) expect((await answer.next()).done).toBe(false);
        if (random.next() < 0.5) {
          await answer.return?.();
          stages.left += 1;
        } else {
          controller.abort(new Error('enough'));
          // Tokens that came before are given first.
          await expect(collect(answer)).rejects.toThrow('enough');
          stages.answering += 1;
        }
      };
      const lanes = Array.from({ length: 8 }, async (_, lane) => {
        for (let index = lane; index < mostAborts; index += 8) await stop(index);
      });
      const stays = Array.from({ length: 8 }, (_, index) => collect(engine.generateTokens(promptOf(index), optionsOf(index))));
      expect(await Promise.all(stays)).toEqual(alone.slice(0, 8));
      await Promise.all(lanes);
      await idle(engine);
      for (const count of Object.values(stages)) expect(count).toBeGreaterThan(mostAborts / 20);
    }));

  it('ends a request whose scores are NaN, and its 63 neighbours keep their answers', () =>
    use({ sequences: 64 }, async (engine) => {
      // Greedy ones: a draw may fall between sums of two orders, and so many prompts are cut elsewhere than alone.
      const greedy = alone.flatMap((_, index) => (index % 3 === 0 ? [] : [index]));
      const numbers = [...greedy, ...greedy, ...greedy].slice(0, 63);
      const neighbours = numbers.map((index) => collect(engine.generateTokens(promptOf(index), optionsOf(index))));
      const poisoned = collect(engine.generateTokens(text.slice(0, 34)));
      await expect(poisoned).rejects.toThrow(InvalidValueError);
      expect(await Promise.all(neighbours)).toEqual(numbers.map((index) => alone[index]));
      await idle(engine);
    }));

  it('ends the requests of a stream that failed, and serves those that wait on another runner', () =>
    use({ sequences: 2 }, async (engine) => {
      const { runner } = engine;
      const ended = [text.slice(0, 33), promptOf(1)].map((prompt) => collect(engine.generateTokens(prompt, { maxTokens: 60, endIds: [] })));
      const waits = collect(engine.generateTokens(promptOf(2), optionsOf(2)));
      for (const answer of ended) await expect(answer).rejects.toThrow(enqueuedFailure);
      expect(await waits).toEqual(alone[2]);
      expect(engine.runner).not.toBe(runner);
      expect(() => runner.openSequence()).toThrow(DisposedError);
    }));

  it('takes requests while it opens another runner, and says of none that a runner was disposed', async () => {
    const dense = policy.store;
    let lacking = 0;
    /** A new runner finds its memory a moment later, as where that of the one before is given back meanwhile. */
    const create: KvStoreFactory['create'] = (layers, capacity) => {
      if (lacking > 0) {
        lacking -= 1;
        throw new OutOfMemoryError('it is not back yet');
      }
      return dense.create(layers, capacity);
    };
    await use({ policy: kvPolicy({ store: { name: 'late', create }, prefill: failing }), sequences: 4 }, async (engine) => {
      for (const failures of [0, 2]) {
        lacking = failures;
        const later: Promise<number[]>[] = [];
        const ask = () => later.push(collect(engine.generateTokens(promptOf(3), optionsOf(3))));
        const ended = [text.slice(0, 33), promptOf(1), promptOf(2)].map((prompt) => {
          const answer = collect(engine.generateTokens(prompt, { maxTokens: 60, endIds: [] }));
          answer.catch(() => {
            ask();
            for (let turn = 0; turn < 4; turn++) setTimeout(ask, 3 * turn);
          });
          return answer;
        });
        for (const answer of ended) await expect(answer).rejects.toThrow(enqueuedFailure);
        await new Promise((resolve) => setTimeout(resolve, 30));
        expect(later.length).toBe(15);
        for (const answer of later) expect(await answer).toEqual(alone[3]);
      }
    });
  });

  it('ends a request whose selection fails, and no other', () =>
    use({}, async (engine) => {
      const select = { name: 'failing', observationWindow: 0, select: () => Promise.reject(new InvalidValueError('no selection')) };
      const neighbour = collect(engine.generateTokens(promptOf(1), optionsOf(1)));
      await expect(collect(engine.generateTokens(promptOf(2), { select }))).rejects.toThrow('no selection');
      expect(await neighbour).toEqual(alone[1]);
      await idle(engine);
    }));

  it('ends all requests when it is closed', () =>
    use({ sequences: 2 }, async (engine) => {
      const answers = [1, 2, 4].map((index) => collect(engine.generateTokens(promptOf(index), { maxTokens: 60, endIds: [] })));
      await nextTurn();
      const closing = engine.close();
      for (const answer of answers) await expect(answer).rejects.toThrow(DisposedError);
      await closing;
      expect(() => engine.generateTokens([1])).toThrow(DisposedError);
    }));

  it('ends all requests, those that wait too, when its scheduler fails, whatever else that breaks', () =>
    use({ sequences: 2 }, async (engine) => {
      const defect = new Error('blocks were miscounted');
      const answers = [1, 2, 4].map((index) => collect(engine.generateTokens(promptOf(index), { maxTokens: 60, endIds: [] })));
      await nextTurn();
      const next = vi.spyOn(Scheduler.prototype, 'next').mockThrow(defect);
      const end = vi.spyOn(Scheduler.prototype, 'end').mockThrow(defect);
      try {
        for (const answer of answers) await expect(answer).rejects.toMatchObject({ name: 'DisposedError', cause: defect });
        expect(() => engine.generateTokens([1])).toThrow(DisposedError);
        expect(engine.load).toEqual({ underWay: 0, waiting: 0 });
      } finally {
        next.mockRestore();
        end.mockRestore();
      }
    }));

  it('serves any number of requests under one signal, which has one listener', () =>
    use({ sequences: 4 }, async (engine) => {
      const controller = new AbortController();
      const { signal } = controller;
      const answers = Array.from({ length: 12 }, (_, index) => collect(engine.generateTokens(promptOf(index), { maxTokens: 60, endIds: [], signal })));
      expect(getEventListeners(signal, 'abort')).toHaveLength(1);
      controller.abort(new Error('enough'));
      for (const answer of answers) await expect(answer).rejects.toThrow('enough');
      await idle(engine);
      expect(getEventListeners(signal, 'abort')).toHaveLength(0);
    }));

  it.each(['gone', '', null, 0])('throws the reason of an abort, %j, as it is', (reason) =>
    use({ sequences: 1 }, async (engine) => {
      const controller = new AbortController();
      const [first, waiting] = [1, 2].map((index) => collect(engine.generateTokens(promptOf(index), { maxTokens: 60, endIds: [], signal: controller.signal })));
      await nextTurn();
      controller.abort(reason);
      await expect(first).rejects.toBe(reason);
      await expect(waiting).rejects.toBe(reason);
      await idle(engine);
    }));

  it('gives no token behind the end of an answer, also of a step that was on its way', () =>
    use({ sequences: 4 }, async (engine) => {
      const controller = new AbortController();
      const options = { maxTokens: 60, endIds: [] };
      const [left, aborted] = [engine.generateTokens(promptOf(1), options), engine.generateTokens(promptOf(2), { ...options, signal: controller.signal })];
      expect(await Promise.all([left.next(), aborted.next()])).toMatchObject([{ done: false }, { done: false }]);
      await left.return?.();
      controller.abort(new Error('enough'));
      await expect(collect(aborted)).rejects.toThrow('enough');
      await idle(engine);
      expect(await Promise.all([left.next(), aborted.next()])).toMatchObject([{ done: true }, { done: true }]);
    }));

  it('refuses what it cannot serve, before it waits', () =>
    use({ cacheTokens: 220 }, async (engine) => {
      const wrong: [new (message: string) => Error, readonly number[], EngineRequestOptions][] = [
        [InvalidValueError, [], {}],
        [InvalidValueError, [4096], {}],
        [InvalidValueError, text.slice(0, 257), {}],
        [InvalidValueError, [1], { maxTokens: 0 }],
        [InvalidValueError, [1], { sampling: { temperature: NaN } }],
        [InvalidValueError, [1], { endIds: 3 as never }],
        [InvalidValueError, [1], { signal: 1 as never }],
        [InvalidValueError, [1], { signal: { aborted: false, throwIfAborted: () => undefined } as never }],
        [InvalidValueError, [1], { select: 1 as never }],
        [OutOfMemoryError, text.slice(0, 200), {}],
      ];
      for (const [kind, prompt, options] of wrong) expect(() => engine.generateTokens(prompt, options)).toThrow(kind);
      const reason = new Error('too late');
      expect(() => engine.generateTokens([1], { signal: AbortSignal.abort(reason) })).toThrow(reason);
      await idle(engine);
    }));
});
