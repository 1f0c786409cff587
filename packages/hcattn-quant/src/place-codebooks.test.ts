import { InvalidValueError, ShapeError } from '@kv/sparse-core';
import { describeOnDevices, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { placeCodebooks } from './place-codebooks.js';
import { randomCodebooks } from './testing/random-codebooks.js';

const sizes = { layers: 2, kvHeads: 2, headDim: 16, groups: 8, centroids: 20 };

describeOnDevices('placeCodebooks', ({ open }) => {
  it('places the centroids and scales of a layer; scales that are all 1 are left out', async () => {
    const stream = open().createStream();
    const codebooks = randomCodebooks(new Random(1), { ...sizes, scaled: true });
    const plain = randomCodebooks(new Random(2), sizes);
    const placed = await placeCodebooks(stream, codebooks, 1);
    expect(placed.codeBits).toBe(5);
    expect(await placed.centroids.read(stream)).toEqual(codebooks.layers[1]?.centroids);
    expect(await placed.channelScale?.read(stream)).toEqual(codebooks.layers[1]?.scale);
    expect((await placeCodebooks(stream, plain, 0)).channelScale).toBeUndefined();
  });

  it('refuses layers that there are not, and codebooks that contradict themselves', async () => {
    const device = open();
    const stream = device.createStream();
    const codebooks = randomCodebooks(new Random(1), sizes);
    const before = device.memory().live;
    for (const layer of [2, -1, 0.5, NaN]) await expect(placeCodebooks(stream, codebooks, layer)).rejects.toThrow(InvalidValueError);
    await expect(placeCodebooks(stream, { ...codebooks, groups: 4 }, 0)).rejects.toThrow(ShapeError);
    expect(device.memory().live).toEqual(before);
  });
});
