import { Buffer } from 'node:buffer';
import { execFile } from 'node:child_process';
import { promisify } from 'node:util';
import { describe, expect, it } from 'vitest';
import { createDevice, devices } from './device.js';
import { DeviceError, DisposedError, DTypeError, InvalidValueError, OutOfMemoryError, ShapeError } from './errors.js';
import type { Device } from './handles.js';
import { HostPool, hostPool, type HostPoolProgress } from './host-pool.js';
import { nativeBinary } from './load-addon.js';
import { rmsNorm } from './operations/rms-norm.js';
import { eventually } from './testing/eventually.js';
import { Random } from './testing/random.js';
import { describeOnDeviceKinds } from './testing/test-devices.js';

const MiB = 1 << 20;

/** Bytes of the host that the device holds: pinned, or on the CPU among its tensors. */
function hostBytes(device: Device): number {
  const { pinned, live } = device.memory();
  return device.kind === 'cpu' ? live : pinned;
}

const bytesOf = (array: Int32Array) => Buffer.from(array.buffer, array.byteOffset, array.byteLength);

/** Memory goes back by itself, once the device is done with it. */
async function expectSoon(value: () => number, wanted: number): Promise<void> {
  await eventually(() => value() === wanted);
  expect(value()).toBe(wanted);
}

describeOnDeviceKinds('host tensors', ({ open }) => {
  const device = open();
  const random = new Random(18);
  const [rows, hidden] = [5, 64];

  it('are read and written by kernels where they are', async () => {
    const elements = random.elements('f32', rows * hidden);
    using stream = device.createStream();
    using weight = device.tensor('f32', ['hidden'], [hidden], random.elements('f32', hidden));
    using there = device.tensor('f32', ['row', 'hidden'], [rows, hidden], elements);
    using here = await device.hostTensor('f32', ['row', 'hidden'], [rows, hidden]);
    stream.write(here, elements);
    for (let i = 0; i < 3; i++) {
      rmsNorm(stream, { input: here, weight, output: here, epsilon: 1e-5 });
      rmsNorm(stream, { input: there, weight, output: there, epsilon: 1e-5 });
    }
    expect(await here.read()).toEqual(await there.read());
  });

  it('are what kernels of a GPU take in place of wrapped arrays, which they do not reach', async () => {
    using stream = device.createStream();
    using weight = device.tensor('f32', ['hidden'], [hidden], new Float32Array(hidden).fill(1));
    using output = device.tensor('f32', ['row', 'hidden'], [rows, hidden]);
    using wrapped = device.wrap('f32', ['row', 'hidden'], [rows, hidden], random.elements('f32', rows * hidden));
    using here = await device.hostTensor('f32', ['row', 'hidden'], [rows, hidden]);
    const normalised = (input: typeof wrapped) => {
      rmsNorm(stream, { input: input.slice('row', 0, rows), weight, output, epsilon: 1e-5 });
      return output.read(stream);
    };
    stream.copy(wrapped, here);
    const expected = await normalised(here);
    if (device.kind === 'cpu') expect(await normalised(wrapped)).toEqual(expected);
    else expect(() => normalised(wrapped)).toThrow(DeviceError);
  });

  it('are copied in stream order, whole, in part, and over the border of what is made at once', async () => {
    using stream = device.createStream();
    const count = (65 * MiB) / 4;
    const elements = new Int32Array(count).map((_, index) => index);
    const odd = new Int32Array(count / 2).map((_, index) => 2 * index + 1);
    using host = await device.hostTensor('i32', ['pair', 'member'], [count / 2, 2]);
    using other = await device.hostTensor('i32', ['pair', 'member'], [count / 2, 2]);
    using there = device.tensor('i32', ['pair', 'member'], [count / 2, 2], elements);
    using zeros = device.tensor('i32', ['pair', 'member'], [count / 2, 2], new Int32Array(count));
    using seconds = device.tensor('i32', ['pair', 'member'], [count / 2, 1]);
    for (let round = 0; round < 3; round++) {
      stream.copy(zeros, host);
      stream.copy(there, host);
      stream.copy(zeros, other);
      stream.copy(host, other);
      stream.copy(other.slice('member', 1, 2), seconds);
      stream.copy(zeros, host);
      stream.copy(other, host);
      const read = host.read(stream);
      stream.copy(zeros, host);
      stream.copy(zeros, other);
      // A report of two arrays of this size would take gigabytes.
      expect(bytesOf(await read).equals(bytesOf(elements))).toBe(true);
      expect(bytesOf(await seconds.read(stream)).equals(bytesOf(odd))).toBe(true);
    }
  });

  it('leave wrapped arrays to copies, each of which finds there what the one ahead brought', async () => {
    using stream = device.createStream();
    const count = (16 * MiB) / 4;
    using there = device.tensor('i32', ['value'], [count], new Int32Array(count).fill(7));
    using wrapped = device.wrap('i32', ['value'], [count], new Int32Array(count));
    using copied = device.tensor('i32', ['value'], [count]);
    stream.copy(there, wrapped);
    stream.copy(wrapped, copied);
    expect((await copied.read(stream)).findIndex((value) => value !== 7)).toBe(-1);
  });

  it('are copied in recordings, to the device, from it, and between them', async () => {
    using stream = device.createStream();
    using pool = await hostPool(device, { bytes: 3 * 256 });
    const [first, second, third] = Array.from({ length: 3 }, () => pool.tensor('i32', ['value'], [4]));
    using there = device.tensor('i32', ['value'], [4]);
    if (first === undefined || second === undefined || third === undefined) throw new Error('a tensor is missing');
    using recording = stream.record(() => {
      stream.copy(first, there);
      stream.copy(there, second);
      stream.copy(second, third);
    });
    for (let round = 0; round < 5; round++) {
      const values = Int32Array.from([round, 1, 2, 3]);
      stream.write(first, values);
      stream.replay(recording);
      expect(await third.read()).toEqual(values);
    }
  });

  it.skipIf(device.kind === 'cpu')('are copied to tensors of the CPU and from them, which may go at once', async () => {
    const cpu = createDevice({ threads: 1 });
    using stream = device.createStream();
    using host = await device.hostTensor('i32', ['row', 'column'], [1000, 2]);
    using there = device.tensor('i32', ['row', 'column'], [1000, 2]);
    const elements = Int32Array.from({ length: 2000 }, (_, index) => index);
    for (const [source, target] of [
      [host, there],
      [there, host],
    ] as const) {
      const from = cpu.tensor('i32', ['row', 'column'], [1000, 2], elements);
      stream.copy(from, source);
      from.dispose();
      using whole = cpu.tensor('i32', ['row', 'column'], [1000, 2]);
      const seconds = cpu.tensor('i32', ['row', 'column'], [1000, 1]);
      stream.copy(source, target);
      stream.copy(target, whole);
      stream.copy(target.slice('column', 1, 2), seconds);
      const read = seconds.read(stream);
      seconds.dispose();
      expect(await whole.read(stream)).toEqual(elements);
      expect((await read).every((value, index) => value === 2 * index + 1)).toBe(true);
    }
  });

  it('are counted while they are there', async () => {
    const own = open();
    const before = hostBytes(own);
    const tensor = await own.hostTensor('u8', ['byte'], [3 * MiB]);
    expect(hostBytes(own) - before).toBe(3 * MiB);
    tensor.dispose();
    await expectSoon(() => hostBytes(own), before);
    using empty = await device.hostTensor('f32', ['row', 'column'], [0, 7]);
    expect(await empty.read()).toEqual(new Float32Array(0));
  });

  it('stay until the work that uses them is done', async () => {
    const own = open();
    using stream = own.createStream();
    const bytes = 16 * MiB;
    using there = own.tensor('u8', ['copy', 'byte'], [2, bytes], new Uint8Array(2 * bytes).fill(7));
    const before = hostBytes(own);
    using pool = await hostPool(own, { bytes });
    const tensor = pool.tensor('u8', ['copy', 'byte'], [1, bytes]);
    stream.write(tensor, new Uint8Array(bytes).fill(9));
    for (let i = 0; i < 20; i++) stream.copy(there.slice('copy', 0, 1), there.slice('copy', 1, 2));
    stream.copy(tensor, there.slice('copy', 1, 2));
    tensor.dispose();
    pool.dispose();
    const copied = await there.slice('copy', 1, 2).read(stream);
    expect(copied.every((byte) => byte === 9)).toBe(true);
    await expectSoon(() => hostBytes(own), before);
  });

  it('are refused when they do not fit, and nothing is held', async () => {
    const own = open();
    const before = own.memory();
    await expect(own.hostTensor('u8', ['byte'], [2 ** 50])).rejects.toThrow(OutOfMemoryError);
    await expect(hostPool(own, { bytes: 2 ** 45 })).rejects.toThrow(/35184372088832 bytes/);
    await expect(own.hostTensor('f32', ['byte'], [-1])).rejects.toThrow(ShapeError);
    await expect(own.hostTensor('f8' as 'f32', ['byte'], [1])).rejects.toThrow(DTypeError);
    for (const bytes of [0, -1, 1.5, NaN, '1' as never]) {
      await expect(hostPool(own, { bytes })).rejects.toThrow(InvalidValueError);
    }
    for (const options of [undefined, 7, { bytes: 1, onProgress: 7 }, { bytes: 1, signal: {} }]) {
      await expect(hostPool(own, options as never)).rejects.toThrow(InvalidValueError);
    }
    await expect(hostPool({ kind: 'cpu', native: own.native } as never, { bytes: 1 })).rejects.toThrow(DeviceError);
    expect(own.memory()).toEqual(before);
  });
});

describeOnDeviceKinds('a host pool', ({ open }) => {
  const device = open();

  it('gives tensors at once, and takes back what is disposed', async () => {
    using pool = await hostPool(device, { bytes: 1000 });
    expect([pool.byteLength, pool.available]).toEqual([1000, 1024]);
    using first = pool.tensor('f32', ['value'], [100]);
    const second = pool.tensor('u8', ['byte'], [512]);
    device.defaultStream.write(first, new Float32Array(100).fill(1));
    device.defaultStream.write(second, new Uint8Array(512).fill(2));
    expect((await first.read()).every((value) => value === 1)).toBe(true);
    expect(() => pool.tensor('u8', ['byte'], [1])).toThrow(/1 bytes were asked for of a host pool of 1000, which has 0/);
    second.dispose();
    await device.defaultStream.synchronize();
    await expectSoon(() => pool.available, 512);
    using third = pool.tensor('u8', ['byte'], [512]);
    expect(third.byteLength).toBe(512);
    expect(() => pool.tensor('u8', ['byte'], [-1])).toThrow(ShapeError);
  });

  it('may go before its tensors', async () => {
    const own = open();
    const before = hostBytes(own);
    const pool = await hostPool(own, { bytes: MiB });
    const tensor = pool.tensor('i32', ['value'], [3]);
    pool.dispose();
    pool.dispose();
    expect(() => pool.tensor('i32', ['value'], [3])).toThrow(DisposedError);
    expect(() => pool.available).toThrow(DisposedError);
    own.defaultStream.write(tensor, new Int32Array([1, 2, 3]));
    expect(Array.from(await tensor.read())).toEqual([1, 2, 3]);
    expect(hostBytes(own) - before).toBe(MiB);
    tensor.dispose();
    await own.defaultStream.synchronize();
    await expectSoon(() => hostBytes(own), before);
  });

  it('says how far it is, while JavaScript goes on', async () => {
    const seen: HostPoolProgress[] = [];
    let turns = 0;
    const turn = () => {
      turns += 1;
      next = setImmediate(turn);
    };
    let next = setImmediate(turn);
    using pool = await hostPool(device, {
      bytes: 150 * MiB,
      onProgress: (progress) => {
        seen.push(progress);
      },
    });
    clearImmediate(next);
    expect(pool).toBeInstanceOf(HostPool);
    expect(turns).toBeGreaterThanOrEqual(seen.length);
    expect(seen).toEqual([64, 128, 150].map((made) => ({ bytes: made * MiB, total: 150 * MiB })));
  });

  it('gives back what was made when it is aborted, or told to stop', async () => {
    const own = open();
    const before = hostBytes(own);
    const controller = new AbortController();
    const reason = new Error('no longer wanted');
    const seen: number[] = [];
    const onProgress = ({ bytes }: HostPoolProgress) => {
      seen.push(bytes);
      controller.abort(reason);
    };
    const { signal } = controller;
    await expect(hostPool(own, { bytes: 200 * MiB, onProgress, signal })).rejects.toBe(reason);
    expect(seen).toEqual([64 * MiB]);
    await expect(hostPool(own, { bytes: 1, signal })).rejects.toBe(reason);
    const failing = () => {
      throw reason;
    };
    await expect(hostPool(own, { bytes: 1, onProgress: failing })).rejects.toBe(reason);
    await expectSoon(() => hostBytes(own), before);
  });
});

describe('plain host memory', () => {
  it('is held against the memory limit of a CPU device', async () => {
    const device = createDevice({ threads: 1, memoryLimit: 1000 });
    using tensor = await device.hostTensor('u8', ['byte'], [256]);
    await expect(device.hostTensor('u8', ['byte'], [800])).rejects.toThrow(OutOfMemoryError);
    expect(device.memory()).toMatchObject({ live: tensor.byteLength, pinned: 0 });
  });
});

/** In plain JavaScript: a limit of the process would be the test runner's too. */
const program = `
  const addon = require(process.argv[1]);
  const device = new addon.NativeDevice('cuda', 0, 1, undefined, 0);
  const before = device.memory().pinned;
  device.hostPool(1 << 19).makeSlab().then((made) => {
    try {
      device.hostPool(1 << 20);
    } catch (error) {
      console.log(made, device.memory().pinned - before, error.code, /may lock 1048576 \\(ulimit -l\\)/.test(error.message));
    }
  });
`;

describe('pinned host memory', () => {
  it.skipIf(!devices().includes('cuda'))('is held against what the process may lock', async () => {
    const limited = 'ulimit -l 1024 && exec "$0" "$@"';
    const { stdout } = await promisify(execFile)('sh', ['-c', limited, process.execPath, '-e', program, nativeBinary().path]);
    expect(stdout.trim()).toBe('524288 524288 KV_OUT_OF_MEMORY true');
  });
});
