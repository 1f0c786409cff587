import { DTypeError, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { describeOnDevices, expectRefusals, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { filledWith } from '../testing/random-sequences.js';
import { blockMetadata } from './block-metadata.js';
import { fetchBlocks } from './fetch-blocks.js';

const axes = ['block', 'blockToken', 'dim'] as const;
const hostAxes = ['hostBlock', 'blockToken', 'dim'] as const;

describeOnDevices('fetchBlocks', ({ open }) => {
  it('brings the listed blocks of host memory, and no other', async () => {
    const device = open();
    const stream = device.createStream();
    const random = new Random(3);
    for (const [tokens, dim] of [[32, 128], [32, 64], [1, 1], [5, 3], [64, 200]] as const) {
      const [hostBlocks, blocks, room] = [9, 7, 8];
      const size = tokens * dim;
      const bits = (count: number) => Uint16Array.from({ length: count * size }, () => random.integer(0, 65_535));
      const [keyBits, valueBits, former] = [bits(hostBlocks), bits(hostBlocks), bits(blocks)];
      const onHost = async (given: Uint16Array) => {
        const tensor = await device.hostTensor('bf16', hostAxes, [hostBlocks, tokens, dim]);
        stream.write(tensor, given);
        return tensor;
      };
      const [hostKeys, hostValues] = [await onHost(keyBits), await onHost(valueBits)];
      for (const count of [0, 1, 6]) {
        const [from, to] = [random.permutation(hostBlocks), random.permutation(blocks)];
        const loads = new Int32Array(2 * room).fill(-1);
        loads.set(from.subarray(0, count));
        loads.set(to.subarray(0, count), room);
        const keys = device.tensor('bf16', axes, [blocks, tokens, dim], former);
        const values = device.tensor('bf16', axes, [blocks, tokens, dim], former);
        fetchBlocks(stream, {
          ...{ hostKeys, hostValues, keys, values },
          loads: device.tensor('i32', ['end', 'load'], [2, room], loads),
          loadCount: device.tensor('i32', ['one'], [1], Int32Array.of(count)),
        });
        const loaded = (pool: Uint16Array) => {
          const wanted = former.slice();
          for (let load = 0; load < count; load++) {
            const read = from[load] ?? NaN;
            wanted.set(pool.subarray(read * size, (read + 1) * size), (to[load] ?? NaN) * size);
          }
          return wanted;
        };
        expect(await keys.read(stream)).toEqual(loaded(keyBits));
        expect(await values.read(stream)).toEqual(loaded(valueBits));
      }
    }
  });

  const good = async () => {
    const device = open();
    const host = () => device.hostTensor('f16', hostAxes, [4, 2, 8]);
    const pool = () => device.tensor('f16', axes, [3, 2, 8]);
    return {
      ...{ hostKeys: await host(), hostValues: await host(), keys: pool(), values: pool() },
      loads: device.tensor('i32', ['end', 'load'], [2, 2], Int32Array.of(3, 0, 2, 1)),
      loadCount: device.tensor('i32', ['one'], [1], Int32Array.of(2)),
    };
  };

  it('finds any byte that changed behind the checksums of blockMetadata', async () => {
    const device = open();
    const stream = device.createStream();
    const random = new Random(11);
    const [blocks, tokens, dim] = [4, 32, 64];
    const bits = () => Uint16Array.from({ length: blocks * tokens * dim }, () => random.integer(0, 65_535));
    const [keyBits, valueBits] = [bits(), bits()];
    const pool = (given?: Uint16Array) => device.tensor('f16', axes, [blocks, tokens, dim], given);
    const table = device.tensor('i32', ['slot', 'kvHead', 'block'], [1, 1, blocks], Int32Array.from({ length: blocks }, (_, block) => block));
    const checksums = device.tensor('i32', ['metadataBlock'], [blocks]);
    blockMetadata(stream, {
      ...{ keys: pool(keyBits), values: pool(valueBits), checksums, blockTable: table, metadataTable: table },
      ...{ metadata: device.tensor('f16', ['metadataBlock', 'vector', 'dim'], [blocks, 1, dim]), method: 'mean', rows: blocks * tokens },
      keyCounts: device.tensor('i32', ['slot', 'kvHead'], [1, 1], Int32Array.of(blocks * tokens)),
      slots: device.tensor('i32', ['batch'], [1], Int32Array.of(0)),
      queryStart: device.tensor('i32', ['boundary'], [2], Int32Array.of(0, blocks * tokens)),
    });
    const [hostKeys, hostValues] = [await device.hostTensor('f16', hostAxes, [blocks, tokens, dim]), await device.hostTensor('f16', hostAxes, [blocks, tokens, dim])];
    const fetched = {
      ...{ hostKeys, hostValues, keys: pool(), values: pool() },
      checksums,
      loads: device.tensor('i32', ['end', 'load'], [2, blocks], Int32Array.of(3, 2, 1, 0, 0, 1, 2, 3)),
      loadCount: device.tensor('i32', ['one'], [1], Int32Array.of(blocks)),
    };
    await stream.synchronize();
    let found = 0;
    for (let flip = 0; flip <= 100; flip++) {
      const flipped = [keyBits.slice(), valueBits.slice()];
      const at = random.integer(0, keyBits.length - 1);
      const of = flipped[flip % 2] ?? new Uint16Array();
      // The first time nothing is flipped.
      if (flip > 0) of[at] = (of[at] ?? 0) ^ (random.integer(1, 255) << random.pick([0, 8]));
      const own = device.createStream();
      own.write(hostKeys, flipped[0] ?? keyBits);
      own.write(hostValues, flipped[1] ?? valueBits);
      fetchBlocks(own, fetched);
      const error = await own.synchronize().catch((thrown: unknown) => thrown);
      if (error === undefined) continue;
      expect(error).toBeInstanceOf(InvalidValueError);
      expect((error as Error).message).toContain(`host block ${Math.floor(at / (tokens * dim))} is not what was written`);
      found++;
    }
    expect(found).toBe(100);
  });

  it.each([
    ['longer than its room', 'loadCount', 3],
    ['shorter than empty', 'loadCount', -1],
    ['of a block that there is not', 'loads', 3],
    ['of a block below zero', 'loads', -1],
  ] as const)('refuses a list %s', async (_, name, number) => {
    const args = await good();
    const stream = args.keys.device.createStream();
    fetchBlocks(stream, { ...args, [name]: filledWith(args[name], number) });
    await expect(stream.synchronize()).rejects.toThrow(InvalidValueError);
  });

  it('refuses bad input with a typed error', async () => {
    const args = await good();
    const { device } = args.keys;
    const stream = device.createStream();
    expectRefusals(fetchBlocks, stream, args, [
      [{ values: device.tensor('bf16', axes, [3, 2, 8]) }, DTypeError],
      [{ values: device.tensor('f16', axes, [2, 2, 8]) }, ShapeError],
      [{ hostValues: device.tensor('f16', hostAxes, [4, 2, 9]) }, ShapeError],
      [{ loadCount: device.tensor('i32', ['one'], [2]) }, ShapeError],
      [{ values: args.keys }, InvalidValueError],
      [{ checksums: device.tensor('i32', ['hostBlock'], [3]) }, ShapeError],
    ]);
    fetchBlocks(stream, args);
    await stream.synchronize();
  });
});
