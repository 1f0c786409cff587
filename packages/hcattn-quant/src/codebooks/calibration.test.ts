import { createRowBatch, type Device, DisposedError, InvalidValueError, type KvStore } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, liveBytes, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { someFingerprint as model } from '../testing/random-codebooks.js';
import { Calibration } from './calibration.js';

const kvHeads = 2;
const headDim = 4;
const layers = Array.from({ length: 3 }, (_, index) => ({ index, queryHeads: 4, kvHeads, headDim }));

/** A cache of two texts with these keys, `[layer][token, kvHead, dim]`, text behind text. */
function read(device: Device, lengths: readonly number[], keys: readonly Float64Array[]): { calibration: Calibration; stores: KvStore[] } {
  const calibration = new Calibration();
  const total = lengths.reduce((sum, length) => sum + length, 0);
  const stores = calibration.store.create(layers, { device, slots: lengths.length, tokensPerSlot: Math.max(...lengths), tokens: total });
  const stream = device.createStream();
  stores.forEach((store, layer) => {
    let first = 0;
    lengths.forEach((rows, slot) => {
      using batch = createRowBatch(device, stream, [{ slot, position: 0, rows }]);
      const numbers = (keys[layer] ?? new Float64Array()).subarray(first * kvHeads * headDim, (first + rows) * kvHeads * headDim);
      using tensor = device.tensor('f32', ['token', 'kvHead', 'dim'], [rows, kvHeads, headDim], new Float32Array(numbers));
      store.prepare(stream, batch);
      store.append(stream, { batch, keys: tensor, values: tensor });
      store.advance(batch);
      first += rows;
    });
  });
  return { calibration, stores };
}

/** Keys whose sub-vectors of two dims are `distinct` ones of each head and layer. */
function keysOf(random: Random, tokens: number, distinct: number) {
  const choices = layers.map(() => Array.from({ length: kvHeads }, () => Array.from({ length: distinct }, () => decode('f16', encode('f16', [random.normal(), random.normal()])))));
  const keys = choices.map((ofLayer) =>
    Float64Array.from(Array.from({ length: tokens }, () => ofLayer.flatMap((ofHead) => [0, 1].flatMap(() => Array.from(random.pick(ofHead))))).flat()),
  );
  return { choices, keys };
}

describeOnDevices('Calibration', ({ open }) => {
  const device = open();
  const small = { model, groups: 2, centroids: 20, iterations: 6, batchVectors: 500 } as const;

  it('trains each head of each layer on the keys of all texts', async () => {
    const { choices, keys } = keysOf(new Random(1), 500, 20);
    const { calibration, stores } = read(device, [370, 130], keys);
    const progress: string[] = [];
    const codebooks = await calibration.train({ ...small, onProgress: ({ iterations, total }) => progress.push(`${iterations}/${total}`) });
    expect(codebooks).toMatchObject({ model, headDim: 4, groups: 2, books: 1, centroids: 20 });
    expect(codebooks.training).toEqual({ seed: 0, iterations: 6, batchVectors: 500, keys: 500 });
    expect(progress).toEqual(['5/18', '6/18', '11/18', '12/18', '17/18', '18/18']);
    codebooks.layers.forEach((layer, index) => {
      const found = decode('f16', layer.centroids);
      for (let kvHead = 0; kvHead < kvHeads; kvHead++) {
        const rows = Array.from({ length: 20 }, (_, centroid) => String(found.subarray((kvHead * 20 + centroid) * 2, (kvHead * 20 + centroid + 1) * 2)));
        expect(rows.sort()).toEqual((choices[index]?.[kvHead] ?? []).map(String).sort());
      }
    });
    const repeated = await calibration.train(small);
    expect(repeated).toEqual(codebooks);
    expect(await calibration.train({ ...small, seed: 1 })).not.toEqual(codebooks);
    for (const store of stores) store.dispose();
  });

  it('makes a codebook for each group, and scales channels, when it is asked to', async () => {
    const { calibration } = read(device, [900], keysOf(new Random(2), 900, 50).keys);
    const codebooks = await calibration.train({ ...small, separate: true, channelScale: true });
    expect(codebooks.books).toBe(2);
    expect(codebooks.layers.map(({ centroids }) => centroids.length)).toEqual([160, 160, 160]);
    expect(codebooks.layers.every(({ scale }) => scale.every((each) => each > 0 && each !== 1))).toBe(true);
  });

  it('ends soon after its signal is aborted, and leaves nothing behind', async () => {
    const own = open();
    const { calibration, stores } = read(own, [400], keysOf(new Random(3), 400, 30).keys);
    const aborting = new AbortController();
    const reached: number[] = [];
    const training = calibration.train({
      ...{ ...small, iterations: 1000, signal: aborting.signal },
      onProgress: ({ iterations }) => {
        reached.push(iterations);
        if (iterations >= 20) aborting.abort(new Error('enough'));
      },
    });
    await expect(training).rejects.toThrow('enough');
    expect(reached.at(-1)).toBe(20);
    await expect(calibration.train({ ...small, signal: AbortSignal.abort(new Error('before')) })).rejects.toThrow('before');
    for (const store of stores) store.dispose();
    expect(await liveBytes(own, 0)).toBe(0);
  });

  it('refuses too few keys before it begins, and counts them', async () => {
    const { calibration } = read(device, [300], keysOf(new Random(4), 300, 30).keys);
    const few = (changed: object) => calibration.train({ ...small, ...changed });
    await expect(few({ centroids: 16 })).rejects.toThrow(/300 keys of a head give 600 vectors for a codebook of 16 centroids, 37\.5 for each; 39 are wanted\. Give texts of 312 tokens or more, or ask for 15 centroids or fewer/);
    await expect(few({ centroids: 16 })).rejects.toThrow(InvalidValueError);
    await expect(few({ centroids: 8, separate: true })).rejects.toThrow(/300 vectors/);
    await few({ centroids: 15 });
  });

  it('refuses options before texts are read', () => {
    const { calibration, stores } = read(device, [20], keysOf(new Random(7), 20, 20).keys);
    const check = (tokens: number, changed: object) => () => calibration.expectTrainable({ ...small, ...changed }, tokens);
    expect(check(390, {})).not.toThrow();
    expect(check(389, {})).toThrow(/389 keys of a head give 778 vectors/);
    expect(check(390, { groups: 3 })).toThrow(/groups is 3/);
    for (const tokens of [undefined, -1, 0.5, NaN]) expect(check(tokens as never, {})).toThrow(InvalidValueError);
    expect(() => new Calibration().expectTrainable(small, 390)).toThrow(/no runner has its store/);
    for (const store of stores) store.dispose();
  });

  it('refuses keys that are not finite', async () => {
    const { keys } = keysOf(new Random(5), 500, 20);
    keys[1]?.fill(NaN, 8 * 123, 8 * 123 + 1);
    const { calibration } = read(device, [500], keys);
    await expect(calibration.train({ ...small, centroids: 12 })).rejects.toThrow(/token 123 of kv head 0/);
  });

  it('refuses what cannot be', async () => {
    const { calibration, stores } = read(device, [500], keysOf(new Random(6), 500, 20).keys);
    const wrong: object[] = [
      { model: undefined }, { model: 'needle' }, { groups: 3 }, { groups: 0 }, { centroids: 1 }, { centroids: 8193 }, { separate: 1 }, { channelScale: 'yes' }, { seed: -1 }, { seed: 0.5 },
      { iterations: 0 }, { iterations: 30_001 }, { batchVectors: 0 }, { device: {} }, { signal: {} }, { onProgress: 1 },
    ];
    for (const changed of wrong) {
      await expect(calibration.train({ ...small, ...changed }), JSON.stringify(changed)).rejects.toThrow(InvalidValueError);
    }
    await expect(calibration.train(undefined as never)).rejects.toThrow(InvalidValueError);
    await expect(new Calibration().train(small)).rejects.toThrow(/no runner has its store/);
    for (const store of stores) store.dispose();
    await expect(calibration.train({ ...small, centroids: 12 })).rejects.toThrow(DisposedError);
  });
});
