import { DeviceError, DisposedError, ShapeError } from '@kv/sparse-core';
import { describeOnDevices, liveBytes, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { randomCodebooks } from '../testing/random-codebooks.js';
import { placeCodebooks } from './place-codebooks.js';

const sizes = { layers: 2, kvHeads: 2, headDim: 16, groups: 8, centroids: 20 };

describeOnDevices('placeCodebooks', ({ open }) => {
  it('places the centroids and scales of all layers; scales that are all 1 are left out', async () => {
    const device = open();
    const stream = device.createStream();
    const codebooks = randomCodebooks(new Random(1), { ...sizes, scaled: true });
    const placed = await placeCodebooks(device, codebooks);
    for (const index of [0, 1]) {
      const layer = placed.layer(index);
      expect(layer.codeBits).toBe(5);
      expect(await layer.centroids.read(stream)).toEqual(codebooks.layers[index]?.centroids);
      expect(await layer.channelScale?.read(stream)).toEqual(codebooks.layers[index]?.scale);
    }
    using plain = await placeCodebooks(device, randomCodebooks(new Random(2), sizes));
    expect(plain.layer(0).channelScale).toBeUndefined();
    placed[Symbol.dispose]();
    placed[Symbol.dispose]();
    expect(() => placed.layer(0)).toThrow(DisposedError);
  });

  it('refuses codebooks that contradict themselves, and leaves nothing', async () => {
    const device = open();
    const before = device.memory().live;
    const codebooks = randomCodebooks(new Random(1), sizes);
    await expect(placeCodebooks(device, { ...codebooks, groups: 4 })).rejects.toThrow(ShapeError);
    await expect(placeCodebooks({} as never, codebooks)).rejects.toThrow(DeviceError);
    (await placeCodebooks(device, codebooks))[Symbol.dispose]();
    expect(await liveBytes(device, before)).toBe(before);
  });
});
