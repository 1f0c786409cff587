import { setTimeout } from 'node:timers/promises';

import { expect, it } from 'vitest';
import { CapabilityError, DeviceError, DisposedError, InvalidValueError } from './errors.js';
import { embedding } from './operations/embedding.js';
import { rmsNorm } from './operations/rms-norm.js';
import { Random } from './testing/random.js';
import { describeOnDevices } from './testing/test-devices.js';
import type { Stream, Tensor } from './handles.js';

const [rows, vocabulary, hidden] = [3, 11, 64];

describeOnDevices('a recording', ({ open }) => {
  const device = open();
  const random = new Random(31);
  const table = device.tensor('f32', ['vocabulary', 'hidden'], [vocabulary, hidden], random.elements('f32', vocabulary * hidden));
  const weight = device.tensor('f32', ['hidden'], [hidden], random.elements('f32', hidden));

  /** Looks rows up, and normalises them three times. */
  function work(stream: Stream, ids: Tensor<'i32', readonly ['token']>, output: Tensor<'f32', readonly ['token', 'hidden']>) {
    embedding(stream, { ids, table, output });
    for (let i = 0; i < 3; i++) rmsNorm(stream, { input: output, weight, output, epsilon: 1e-5 });
  }

  function rowsOf(stream: Stream, ids: readonly number[]): Promise<Float32Array> {
    using given = device.tensor('i32', ['token'], [rows], Int32Array.from(ids));
    using output = device.tensor('f32', ['token', 'hidden'], [rows, hidden]);
    work(stream, given, output);
    return output.read(stream);
  }

  it('does at every replay what its operations do, on what is in their tensors then', async () => {
    using stream = device.createStream();
    using ids = device.tensor('i32', ['token'], [rows], new Int32Array(rows));
    using output = device.tensor('f32', ['token', 'hidden'], [rows, hidden], new Float32Array(rows * hidden).fill(NaN));
    using recording = stream.record(() => {
      work(stream, ids, output);
    });
    expect((await output.read(stream)).every(Number.isNaN)).toBe(true);
    for (let round = 0; round < 20; round++) {
      const given = Array.from({ length: rows }, () => random.integer(0, vocabulary - 1));
      stream.write(ids, Int32Array.from(given));
      stream.replay(recording);
      const [replayed, direct] = await Promise.all([output.read(stream), rowsOf(stream, given)]);
      expect(replayed).toEqual(direct);
    }
  });

  it('names the operation that fails inside it', async () => {
    using stream = device.createStream();
    using ids = device.tensor('i32', ['token'], [rows], new Int32Array(rows));
    using output = device.tensor('f32', ['token', 'hidden'], [rows, hidden]);
    using recording = stream.record(() => {
      work(stream, ids, output);
    });
    for (let replay = 0; replay < 3; replay++) stream.replay(recording);
    await stream.synchronize();
    stream.write(ids, Int32Array.of(0, vocabulary, 0));
    stream.replay(recording);
    await expect(stream.synchronize()).rejects.toThrow(/^embedding: ids\[1\] is 11/);
  });

  it('keeps its tensors until it is disposed, also while replays are on their way', async () => {
    using stream = device.createStream();
    using kept = device.tensor('f32', ['token', 'hidden'], [rows, hidden]);
    await rowsOf(stream, [0, 0, 0]);
    await stream.synchronize(); // what was disposed is given back by now
    const before = device.memory().live;
    const ids = device.tensor('i32', ['token'], [rows], new Int32Array([4, 5, 6]));
    const output = device.tensor('f32', ['token', 'hidden'], [rows, hidden]);
    const recording = stream.record(() => {
      work(stream, ids, output);
      stream.copy(output, kept);
    });
    ids.dispose();
    output.dispose();
    for (let round = 0; round < 50; round++) stream.replay(recording);
    expect(device.memory().live).toBeGreaterThan(before);
    recording.dispose();
    expect(await kept.read(stream)).toEqual(await rowsOf(stream, [4, 5, 6]));
    await stream.synchronize();
    expect(device.memory().live).toBe(before);
    expect(() => {
      stream.replay(recording);
    }).toThrow(DisposedError);
  });

  it('is replayed while other memory goes that its stream has used', async () => {
    using stream = device.createStream();
    using ids = device.tensor('i32', ['token'], [rows], new Int32Array([1, 2, 3]));
    using output = device.tensor('f32', ['token', 'hidden'], [rows, hidden]);
    const expected = await rowsOf(stream, [1, 2, 3]);
    for (let round = 0; round < 10; round++) {
      using recording = stream.record(() => {
        for (let i = 0; i < 20; i++) work(stream, ids, output);
      });
      const used = Array.from({ length: 20 }, () => device.tensor('i32', ['token'], [rows]));
      for (const tensor of used) stream.copy(ids, tensor);
      await stream.synchronize();
      // At the second one CUDA captures its graph.
      for (let replay = 0; replay < 2; replay++) stream.replay(recording);
      for (const tensor of used) tensor.dispose();
      expect(await output.read(stream)).toEqual(expected);
    }
  });

  it('is dropped with its stream', async () => {
    const stream = device.createStream();
    using ids = device.tensor('i32', ['token'], [rows], new Int32Array(rows));
    using output = device.tensor('f32', ['token', 'hidden'], [rows, hidden]);
    const recording = stream.record(() => {
      work(stream, ids, output);
    });
    for (let round = 0; round < 50; round++) stream.replay(recording);
    stream.dispose();
    recording.dispose();
    expect(await rowsOf(device.defaultStream, [1, 2, 3])).toHaveLength(rows * hidden);
  });

  it.each([0, 1, 2])('names the operation that fails, in replay %i', async (round) => {
    using stream = device.createStream();
    using ids = device.tensor('i32', ['token'], [rows], new Int32Array(rows));
    const poison = new Float32Array(rows * hidden).fill(NaN);
    using output = device.tensor('f32', ['token', 'hidden'], [rows, hidden], poison);
    using recording = stream.record(() => {
      work(stream, ids, output);
    });
    for (let i = 0; i < round; i++) stream.replay(recording);
    await stream.synchronize();
    const earlier = stream.synchronize();
    stream.write(ids, new Int32Array([0, vocabulary, 0]));
    stream.replay(recording);
    await earlier;
    await expect(stream.synchronize()).rejects.toThrow(/^embedding: ids\[1\] is 11/);
    stream.replay(recording);
    await expect(stream.synchronize()).rejects.toThrow(InvalidValueError);
  });

  it('spans streams that wait for each other, and has the bits of the same work in order', async () => {
    using stream = device.createStream();
    using side = device.createStream();
    using ids = device.tensor('i32', ['token'], [rows], new Int32Array(rows));
    using first = device.tensor('f32', ['token', 'hidden'], [rows, hidden]);
    using left = device.tensor('f32', ['token', 'hidden'], [rows, hidden]);
    using right = device.tensor('f32', ['token', 'hidden'], [rows, hidden]);
    const normalise = (on: Stream, input: typeof first, output: typeof first) => {
      rmsNorm(on, { input, weight, output, epsilon: 1e-5 });
    };
    using joined = device.tensor('f32', ['branch', 'token', 'hidden'], [2, rows, hidden]);
    const half = (branch: number) => joined.slice('branch', branch, branch + 1).view(['token', 'hidden'], [rows, hidden]);
    using recording = stream.record(() => {
      embedding(stream, { ids, table, output: first });
      side.waitFor(stream);
      for (let i = 0; i < 5; i++) {
        normalise(side, first, right);
        normalise(stream, first, left);
      }
      expect(side.recording).toBe(true);
      normalise(side, right, right);
      stream.waitFor(side);
      stream.copy(left, half(0));
      stream.copy(right, half(1));
    });
    expect(side.recording).toBe(false);
    for (let round = 0; round < 10; round++) {
      const given = Array.from({ length: rows }, () => random.integer(0, vocabulary - 1));
      stream.write(ids, Int32Array.from(given));
      stream.replay(recording);
      const replayed = await joined.read();
      stream.write(ids, Int32Array.from(given));
      embedding(stream, { ids, table, output: first });
      normalise(stream, first, left);
      normalise(stream, left, right);
      // The branch normalised its rows twice.
      const expected = [...(await left.read()), ...(await right.read())];
      expect(replayed).toEqual(Float32Array.from(expected));
      // By default a tensor is read in the order of the stream that replays, whichever it was recorded on.
      expect(right.writer).toBe(stream);
    }
    await side.synchronize();
  });

  it('names the operation that fails beside it', async () => {
    using stream = device.createStream();
    using side = device.createStream();
    using ids = device.tensor('i32', ['token'], [rows], new Int32Array(rows));
    using output = device.tensor('f32', ['token', 'hidden'], [rows, hidden]);
    using recording = stream.record(() => {
      side.waitFor(stream);
      embedding(side, { ids, table, output });
      stream.waitFor(side);
    });
    for (let i = 0; i < 3; i++) stream.replay(recording);
    await stream.synchronize();
    stream.write(ids, new Int32Array([0, vocabulary, 0]));
    stream.replay(recording);
    await expect(stream.synchronize()).rejects.toThrow(/^embedding: ids\[1\] is 11/);
    await side.synchronize();
  });

  it('refuses a stream beside it that is not joined, and one that has no part in it', async () => {
    using stream = device.createStream();
    using side = device.createStream();
    using other = device.createStream();
    using ids = device.tensor('i32', ['token'], [rows], new Int32Array(rows));
    using copied = device.tensor('i32', ['token'], [rows], new Int32Array(rows).fill(7));
    const fork = () => {
      side.waitFor(stream);
      side.copy(ids, copied);
    };
    expect(() => stream.record(fork)).toThrow(/^record: another stream/);
    const crossings: (() => void)[] = [
      () => {
        side.waitFor(other);
      },
      () => {
        side.write(ids, new Int32Array(rows));
      },
      () => void side.record(() => undefined),
      () => void other.record(() => {
        other.waitFor(side);
      }),
    ];
    for (const crossing of crossings) {
      const record = () =>
        stream.record(() => {
          fork();
          crossing();
        });
      expect(record).toThrow(/cannot be recorded|no part in this recording|do not nest/);
      expect([stream.recording, side.recording, other.recording]).toEqual([false, false, false]);
    }
    expect(Array.from(await copied.read(side))).toEqual([7, 7, 7]);
    side.copy(ids, copied);
    expect(Array.from(await copied.read())).toEqual([0, 0, 0]);
  });

  it('outlives a stream that was recorded beside it', async () => {
    using stream = device.createStream();
    const side = device.createStream();
    using ids = device.tensor('i32', ['token'], [rows], new Int32Array([1, 2, 3]));
    using copied = device.tensor('i32', ['token'], [rows], new Int32Array(rows));
    using recording = stream.record(() => {
      side.waitFor(stream);
      side.copy(ids, copied);
      stream.waitFor(side);
      side.dispose();
      stream.copy(copied, ids);
    });
    expect(Array.from(await copied.read(stream))).toEqual([0, 0, 0]);
    for (let i = 0; i < 3; i++) stream.replay(recording);
    expect(Array.from(await copied.read())).toEqual([1, 2, 3]);
  });

  it('refuses what the device cannot repeat alone', async () => {
    using stream = device.createStream();
    using other = device.createStream();
    using ids = device.tensor('i32', ['token'], [rows], new Int32Array([1, 2, 3]));
    using earlier = stream.record(() => undefined);
    const crossings: (() => void)[] = [
      () => {
        stream.write(ids, new Int32Array(rows));
      },
      () => {
        stream.waitFor(other);
      },
      () => {
        stream.replay(earlier);
      },
    ];
    for (const crossing of crossings) expect(() => stream.record(crossing)).toThrow(CapabilityError);
    const reads: Promise<unknown>[] = [];
    stream.record(() => void reads.push(ids.read(stream), stream.synchronize())).dispose();
    for (const read of reads) await expect(read).rejects.toThrow(CapabilityError);
    expect(Array.from(await ids.read(stream))).toEqual([1, 2, 3]);
  });

  it('is not ended with the process by what an asynchronous function is refused', async () => {
    using stream = device.createStream();
    const unheard: unknown[] = [];
    const hear = (reason: unknown): void => void unheard.push(reason);
    process.on('unhandledRejection', hear);
    const waits = async (): Promise<void> => {
      await stream.synchronize();
    };
    expect(() => stream.record(waits)).toThrow(InvalidValueError);
    await setTimeout(20);
    process.removeListener('unhandledRejection', hear);
    expect(unheard).toEqual([]);
  });

  it('refuses to nest, to be asynchronous, and to run elsewhere', () => {
    using stream = device.createStream();
    using other = device.createStream();
    const nothing = () => undefined;
    expect(() => stream.record(() => void stream.record(nothing))).toThrow(InvalidValueError);
    expect(() => stream.record(() => Promise.resolve())).toThrow(InvalidValueError);
    expect(stream.recording).toBe(false);
    using recording = stream.record(nothing);
    expect(() => {
      other.replay(recording);
    }).toThrow(DeviceError);
  });
});
