import { densePrefill, type FloatDType, hostPool, InvalidValueError, type KvLayer, type KvStore, linear, type Stream, type TensorHandle } from '@kv/sparse-core';
import { attentionRow, decode, describeOnDeviceKinds, encode, HeldRows, Random, StoreRun, type TestDevice } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import type { BlockMetadata, BlockMetadataMaker, BlocksToDescribe } from './block-metadata-method.js';
import { hierarchicalDeviceBytes, hierarchicalHostBytes, hierarchicalStore } from './hierarchical-store.js';
import { blockMetadata } from './operations/block-metadata.js';

const layer: KvLayer = { index: 0, queryHeads: 2, kvHeads: 2, headDim: 64 };
const [slots, tokensPerSlot, blockTokens] = [3, 1024, 32];
const blocks = { budgetTokens: 224, sinkTokens: 32, localWindow: 32 };
const chunk = (slot: number, position: number, rows: number) => [{ slot, position, rows }];
const range = (length: number) => Array.from({ length }, (_, index) => index);

/** Of each dim of a block: twice its last key less its first one. */
const [first, last] = [-1, 2];

/** A head of which a step reads the sinks, the window, the newest block, and four that the vectors choose. */
class ChosenRows extends HeldRows {
  override clone(): ChosenRows {
    const copy = new ChosenRows(this.dtype, this.headDim);
    copy.take(this);
    return copy;
  }

  override attention(): ReturnType<HeldRows['attention']> {
    const row = (numbers: Float64Array) => (token: number) => numbers.subarray(token * this.headDim, (token + 1) * this.headDim);
    const [keys, values] = [row(this.numbers('keys')), row(this.numbers('values'))];
    return (query, visible, weightRoundoff) => {
      const vector = (block: number) => {
        const [oldest, newest] = [keys(block * blockTokens), keys(block * blockTokens + blockTokens - 1)];
        return decode('f16', encode('f16', oldest.map((key, dim) => first * key + last * (newest[dim] ?? NaN))));
      };
      const score = (block: number) => vector(block).reduce((sum, element, dim) => sum + element * (query[dim] ?? NaN), 0);
      const all = Math.ceil(visible / blockTokens);
      const between = range(all).slice(1, Math.max(1, all - 2));
      const scores = new Map(between.map((block) => [block, score(block)]));
      const best = between.sort((one, other) => (scores.get(other) ?? NaN) - (scores.get(one) ?? NaN));
      const read = new Set([0, ...best.slice(0, blocks.budgetTokens / blockTokens - 3), all - 2, all - 1]);
      const tokens = range(visible).filter((token) => read.has(Math.floor(token / blockTokens)));
      const chosen = (of: typeof keys) => (index: number) => of(tokens[index] ?? NaN);
      return attentionRow(query, tokens.length, this.headDim ** -0.5, chosen(keys), chosen(values), weightRoundoff);
    };
  }
}

/** The store's own `cuboidMean`, of blocks that lie one behind the other. */
const cuboidMean: BlockMetadataMaker = {
  vectors: 2,
  write(stream, { keys, vectors }) {
    const [count, tokens] = keys.shape;
    const i32 = <const A extends readonly string[]>(axes: A, shape: { readonly [Axis in keyof A]: number }, numbers: readonly number[]) =>
      stream.device.tensor('i32', axes, shape, Int32Array.from(numbers));
    using table = i32(['slot', 'kvHead', 'block'], [1, 1, count], range(count));
    using keyCounts = i32(['slot', 'kvHead'], [1, 1], [count * tokens]);
    using slots = i32(['batch'], [1], [0]);
    using queryStart = i32(['boundary'], [2], [0, count * tokens]);
    const metadata = vectors.view(['metadataBlock', 'vector', 'dim'], vectors.shape);
    const tables = { blockTable: table, metadataTable: table, keyCounts, slots, queryStart };
    blockMetadata(stream, { ...tables, keys, metadata, rows: count * tokens, method: 'cuboidMean' });
  },
};

describeOnDeviceKinds('metadata that a user makes', ({ open }: TestDevice) => {
  async function run<Head extends HeldRows>(metadata: BlockMetadata, newHead: () => Head) {
    const device = open();
    const capacity = { device, slots, tokensPerSlot, tokens: slots * tokensPerSlot };
    const options = { ...blocks, metadata };
    const deviceBytes = hierarchicalDeviceBytes(options, [layer], capacity, slots);
    using pool = await hostPool(device, { bytes: hierarchicalHostBytes(options, [layer], capacity) });
    const [store] = hierarchicalStore({ ...options, deviceBytes, hostPool: pool }).create([layer], capacity) as [KvStore];
    expect(store.reserved().device).toBe(deviceBytes);
    return new StoreRun(store, densePrefill(), { device, random: new Random(4), dtype: 'f16', slots, group: 1, recorded: true }, newHead);
  }

  /** Prompts in chunks, answers, and a fork and a cut between them. */
  async function serve<Head extends HeldRows>(of: StoreRun<Head>, step: StoreRun<Head>['check']): Promise<void> {
    await of.step(chunk(0, 0, 350), 'prefill');
    await of.step([...chunk(0, 350, 100), ...chunk(2, 0, 320)], 'prefill');
    for (const each of range(70)) await step([...chunk(0, 450 + each, 1), ...chunk(2, 320 + each, 1)], 'decode');
    of.copy(0, 1);
    for (const each of range(36)) await step([...chunk(1, 520 + each, 1), ...chunk(0, 520 + each, 1)], 'decode');
    of.store.truncate(of.stream, 1, 100);
    for (const head of of.heads[1] ?? []) head.truncate(100);
    for (const each of range(36)) await step(chunk(1, 456 + each, 1), 'decode');
  }

  it('chooses the blocks that are read, as its definition does', async () => {
    const made: number[] = [];
    const weights = new Float32Array(layer.headDim * blockTokens * layer.headDim);
    for (const dim of range(layer.headDim)) {
      weights.set([first], dim * blockTokens * layer.headDim + dim);
      weights.set([last], (dim * blockTokens + blockTokens - 1) * layer.headDim + dim);
    }
    let weight: TensorHandle<'f32', readonly ['out', 'in']> | undefined;
    const write = (stream: Stream, { layer: { headDim }, keys, vectors }: BlocksToDescribe): void => {
      const [count] = keys.shape;
      made.push(count);
      weight ??= stream.device.tensor('f32', ['out', 'in'], [headDim, blockTokens * headDim], weights);
      linear<FloatDType, 'block'>(stream, { input: keys.view(['block', 'in'], [count, blockTokens * headDim]), weight, output: vectors.view(['block', 'out'], [count, headDim]) });
    };
    const chosen = await run({ vectors: 1, write }, () => new ChosenRows('f16', layer.headDim));
    await serve(chosen, (entries, phase) => chosen.check(entries, phase));
    // Full blocks of two heads: of a prompt at once, and of an answer one by one.
    expect(made.slice(0, 3)).toEqual([20, 8, 20]);
    expect(made.slice(3).every((count) => count === 2)).toBe(true);
  });

  it('gives the bits of the store’s own where it is the same', async () => {
    const bitsOf = async (metadata: BlockMetadata) => {
      const all: Float32Array[] = [];
      const of = await run(metadata, () => new HeldRows('f16', layer.headDim));
      await serve(of, async (entries, phase) => void all.push(await of.step(entries, phase)));
      (await of.store.makeDense?.(of.stream, 2))?.();
      const kept = range(200).map((token) => token + Math.floor(token / 3));
      using indices = of.stream.device.tensor('i32', ['kvHead', 'kept'], [2, 200], Int32Array.from([...kept, ...kept]));
      of.store.keep(of.stream, 2, { indices, counts: [200, 200] });
      for (const each of range(34)) all.push(await of.step(chunk(2, 390 + each, 1), 'decode'));
      return all;
    };
    const own = await bitsOf('cuboidMean');
    expect(await bitsOf(cuboidMean)).toEqual(own);
    expect(await bitsOf('minMax')).not.toEqual(own);
  });

  it('ends a step in which it fails or does not return at once', async () => {
    const failing: BlockMetadataMaker = { vectors: 1, write: () => { throw new RangeError('no vectors'); } };
    const waiting: BlockMetadataMaker = { vectors: 1, write: (): undefined => Promise.resolve() as never };
    for (const [maker, message] of [[failing, 'no vectors'], [waiting, /the result of metadata\.write/]] as const) {
      const of = await run(maker, () => new HeldRows('f16', layer.headDim));
      await of.step(chunk(0, 0, 31), 'prefill');
      await expect(of.step(chunk(0, 31, 40), 'prefill')).rejects.toThrow(message);
      of.store.dispose();
    }
  });
});

it('is refused where it is none', () => {
  const write = () => undefined;
  const wrong = [null, {}, [], { vectors: 3, write }, { vectors: '1', write }, { vectors: 1 }, { vectors: 1, write: 2 }, write];
  for (const metadata of wrong) {
    expect(() => hierarchicalStore({ deviceBytes: 2 ** 26, metadata: metadata as never }), JSON.stringify(metadata)).toThrow(InvalidValueError);
  }
});
