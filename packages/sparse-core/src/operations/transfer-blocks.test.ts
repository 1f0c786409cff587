import { expect, it } from 'vitest';
import { InvalidValueError, ShapeError } from '../errors.js';
import { Random } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { transferBlocks } from './transfer-blocks.js';

const axes = ['block', 'blockToken', 'dim'] as const;

describeOnDevices('transferBlocks', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it('copies blocks between pools of device and host, in any order, and leaves the others alone', async () => {
    const random = new Random(31);
    const numbers = (count: number) => Uint16Array.from({ length: count }, () => random.integer(0, 65_535));
    for (let round = 0; round < 40; round++) {
      const [tokens, dim] = [random.integer(1, 9), random.integer(1, 40)];
      const size = tokens * dim;
      const [blocks, written] = [random.integer(1, 30), random.integer(1, 30)];
      const kinds = random.pick([['device', 'host'], ['host', 'device'], ['device', 'device']] as const);
      const bits = [numbers(blocks * size), numbers(written * size)] as const;
      const pool = async (kind: 'device' | 'host', count: number, given: Uint16Array) => {
        if (kind === 'device') return device.tensor('f16', axes, [count, tokens, dim], given);
        const onHost = await device.hostTensor('f16', axes, [count, tokens, dim]);
        stream.write(onHost, given);
        return onHost;
      };
      using source = await pool(kinds[0], blocks, bits[0]);
      using destination = await pool(kinds[1], written, bits[1]);
      const count = random.integer(0, written);
      // Runs that ascend in both, and what breaks them.
      const first = random.integer(0, written - count);
      const to = Array.from({ length: count }, (_, copy) => first + copy);
      const start = random.integer(0, blocks - 1);
      const from = to.map((_, copy) => (random.integer(0, 4) === 0 ? random.integer(0, blocks - 1) : (start + copy) % blocks));
      if (random.integer(0, 2) === 0) to.reverse();
      transferBlocks(stream, { source, destination, from, to });
      const wanted = bits[1].slice();
      to.forEach((block, copy) => {
        const read = from[copy] ?? NaN;
        wanted.set(bits[0].subarray(read * size, (read + 1) * size), block * size);
      });
      expect(await destination.read(stream)).toEqual(wanted);
    }
  });

  it('is in the order of streams that wait for each other', async () => {
    const side = device.createStream();
    const [blocks, tokens, dim] = [64, 64, 128];
    using dense = device.tensor('f32', axes, [blocks, tokens, dim], new Float32Array(blocks * tokens * dim));
    using host = await device.hostTensor('f32', axes, [blocks, tokens, dim]);
    using back = device.tensor('f32', axes, [blocks, tokens, dim]);
    const all = Array.from({ length: blocks }, (_, block) => block);
    for (const round of [1, 2, 3]) {
      stream.write(dense, new Float32Array(blocks * tokens * dim).fill(round));
      side.waitFor(stream);
      transferBlocks(side, { source: dense, destination: host, from: all, to: all });
      transferBlocks(side, { source: host, destination: back, from: all, to: all });
      stream.waitFor(side);
      expect((await back.read(stream)).every((number) => number === round)).toBe(true);
    }
  });

  it.each([
    ['lists of different lengths', [0, 1], [2], ShapeError],
    ['a source outside its pool', [3], [2], InvalidValueError],
    ['a target outside its pool', [0], [-1], InvalidValueError],
    ['a target that is no whole number', [0], [1.5], InvalidValueError],
    ['a target twice', [0, 1], [2, 2], InvalidValueError],
  ])('refuses %s', async (_, from, to, error) => {
    const bytes = Uint8Array.from({ length: 12 }, (__, index) => index);
    using source = device.tensor('u8', axes, [3, 1, 3]);
    using destination = device.tensor('u8', axes, [4, 1, 3], bytes);
    expect(() => {
      transferBlocks(stream, { source, destination, from, to });
    }).toThrow(error);
    expect(await destination.read(stream)).toEqual(bytes);
  });

  it('refuses two pools of the host where the device has memory of its own', async () => {
    using source = await device.hostTensor('u8', axes, [3, 1, 3]);
    using destination = await device.hostTensor('u8', axes, [4, 1, 3]);
    const transfer = () => {
      transferBlocks(stream, { source, destination, from: [1], to: [2] });
    };
    if (device.kind === 'cpu') expect(transfer).not.toThrow();
    else expect(transfer).toThrow(InvalidValueError);
    await stream.synchronize();
  });
});
