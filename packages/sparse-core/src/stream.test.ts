import { expect, it } from 'vitest';
import { DeviceError, DisposedError, DTypeError, InvalidValueError, ShapeError } from './errors.js';
import { embedding } from './operations/embedding.js';
import { enqueuedFailure, enqueueFailure } from './testing/enqueue-failure.js';
import { describeOnDeviceKinds } from './testing/test-devices.js';
import type { Stream } from './handles.js';

describeOnDeviceKinds('streams', ({ open }) => {
  const device = open();

  it('run their work in order', async () => {
    using stream = device.createStream();
    using tensor = device.tensor('i32', ['value'], [1]);
    const reads = Array.from({ length: 100 }, (_, value) => {
      stream.write(tensor, new Int32Array([value]));
      return tensor.read(stream);
    });
    const values = await Promise.all(reads);
    expect(values.map((array) => array[0])).toEqual(Array.from({ length: 100 }, (_, value) => value));
  });

  it('take the bytes of a write at once, however many are on their way', async () => {
    using stream = device.createStream();
    const elements = 1 << 18;
    using tensors = device.tensor('i32', ['write', 'value'], [40, elements]);
    const source = new Int32Array(elements);
    for (let write = 0; write < 40; write++) {
      stream.write(tensors.slice('write', write, write + 1), source.fill(write));
    }
    source.fill(-1);
    const values = await tensors.read(stream);
    expect(values.every((value, index) => value === Math.floor(index / elements))).toBe(true);
  });

  it('see the contents that a new tensor was given', async () => {
    using stream = device.createStream();
    // The last is larger than pinned memory.
    for (const elements of [1, 1000, 1 << 20, 5_000_001]) {
      const contents = Int32Array.from({ length: elements }, (_, index) => index + 1);
      const copies = Array.from({ length: 4 }, () => {
        using source = device.tensor('i32', ['value'], [elements], contents);
        const copy = device.tensor('i32', ['value'], [elements]);
        stream.copy(source, copy);
        return copy;
      });
      contents.fill(0);
      for (const copy of copies) {
        expect((await copy.read(stream)).every((value, index) => value === index + 1)).toBe(true);
        copy.dispose();
      }
    }
  });

  it('copy through pinned memory, where there is a need, which is counted', () => {
    expect(device.memory().pinned).toBe(device.kind === 'cuda' ? 1 << 24 : 0);
  });

  it('wait for one another', async () => {
    using first = device.createStream();
    using second = device.createStream();
    using large = device.tensor('u8', ['byte'], [1 << 22]);
    using copied = device.tensor('u8', ['byte'], [1 << 22]);
    for (let value = 1; value <= 20; value++) {
      first.write(large, new Uint8Array(1 << 22).fill(value));
      second.waitFor(first);
      second.copy(large, copied);
      const bytes = await copied.read(second);
      expect(bytes.every((byte) => byte === value)).toBe(true);
    }
    expect(() => {
      first.waitFor(first);
    }).toThrow(InvalidValueError);
  });

  it.each(['the reader', 'the writer'])('see in order what another writes, however late %s is', async (late) => {
    using first = device.createStream();
    using second = device.createStream();
    const bytes = 1 << 24;
    using work = device.tensor('u8', ['copy', 'byte'], [2, bytes], new Uint8Array(2 * bytes));
    using value = device.tensor('i32', ['value'], [1], new Int32Array([0]));
    using found = device.tensor('i32', ['value'], [3]);
    const [source, target] = [work.slice('copy', 0, 1), work.slice('copy', 1, 2)];
    const delay = (stream: Stream) => {
      for (let i = 0; i < 20; i++) stream.copy(source, target);
    };
    for (let round = 0; round < 3; round++) {
      if (late === 'the writer') delay(first);
      first.write(value, new Int32Array([round + 1]));
      second.waitFor(first);
      if (late === 'the reader') delay(second);
      second.copy(value, found.slice('value', round, round + 1));
      first.waitFor(second);
    }
    expect(Array.from(await found.read(second))).toEqual([1, 2, 3]);
  });

  it('refuse to wait for another device, and for a disposed stream', async () => {
    using stream = device.createStream();
    using foreign = open().createStream();
    const disposed = device.createStream();
    disposed.dispose();
    expect(() => {
      stream.waitFor(foreign);
    }).toThrow(DeviceError);
    expect(() => {
      stream.waitFor(disposed);
    }).toThrow(DisposedError);
    await stream.synchronize();
  });

  it('fail with the stream that they waited for', async () => {
    using failing = device.createStream();
    using waiting = device.createStream();
    using ids = device.tensor('i32', ['token'], [1], new Int32Array([9]));
    using table = device.tensor('f32', ['vocabulary', 'hidden'], [2, 8], new Float32Array(16));
    using output = device.tensor('f32', ['token', 'hidden'], [1, 8]);
    const before = waiting.synchronize();
    embedding(failing, { ids, table, output });
    waiting.waitFor(failing);
    await before;
    await expect(waiting.synchronize()).rejects.toThrow(/^waitFor: embedding: ids\[0\] is 9/);
    await expect(waiting.synchronize()).rejects.toThrow(InvalidValueError);
  });

  it('say once that they have failed, before the wait rejects, and afterwards what ended them', async () => {
    const failures: string[] = [];
    const stream = device.createStream({ onFailure: ({ message }) => void failures.push(message) });
    enqueueFailure(stream);
    const seen = [stream.synchronize(), stream.synchronize()].map((wait) =>
      wait.catch((error: unknown) => [(error as Error).message, failures.length]),
    );
    expect(await Promise.all(seen)).toEqual([[failures[0], 1], [failures[0], 1]]);
    expect(failures).toEqual([expect.stringMatching(enqueuedFailure)]);
    stream.dispose();
    await expect(stream.synchronize()).rejects.toThrow(/was ended by an error \(embedding/);
  });

  it('know what is done by the waits that have come true', async () => {
    using stream = device.createStream();
    using tensor = device.tensor('i32', ['value'], [1]);
    stream.write(tensor, new Int32Array([1]));
    const earlier = stream.synchronize();
    const isDone = stream.progress();
    await earlier;
    expect(isDone()).toBe(false);
    await tensor.read(stream);
    expect(isDone()).toBe(true);
    const isNotDone = stream.progress();
    enqueueFailure(stream);
    await expect(stream.synchronize()).rejects.toThrow(enqueuedFailure);
    expect([isDone(), isNotDone()]).toEqual([true, false]);
  });

  it('take the place of one that failed, behind its work', async () => {
    using failed = device.createStream();
    using next = device.createStream();
    using tensor = device.tensor('i32', ['value'], [1]);
    failed.write(tensor, new Int32Array([1]));
    enqueueFailure(failed);
    next.waitFor(failed, { takesFailure: false });
    await expect(failed.synchronize()).rejects.toThrow(enqueuedFailure);
    expect([...(await tensor.read(next))]).toEqual([1]);
    await next.synchronize();
  });

  it('copy strided tensors into contiguous ones', async () => {
    using source = device.tensor('i32', ['row', 'column'], [2, 3], new Int32Array([1, 2, 3, 4, 5, 6]));
    using destination = device.tensor('i32', ['row', 'column'], [2, 2]);
    device.defaultStream.copy(source.slice('column', 1, 3), destination);
    expect(Array.from(await destination.read())).toEqual([2, 3, 5, 6]);
  });

  it('copy several tensors one behind the other', async () => {
    using numbers = device.tensor('i32', ['value'], [6], new Int32Array([1, 2, 3, 4, 5, 6]));
    using alone = device.tensor('i32', ['value'], [1], new Int32Array([7]));
    using none = device.tensor('i32', ['value'], [0]);
    using destination = device.tensor('i32', ['value'], [6]);
    const part = (first: number, end: number) => numbers.slice('value', first, end);
    const sources = [part(2, 3), part(3, 5), none, alone, part(1, 2), part(1, 2)];
    device.defaultStream.copy(sources, destination);
    expect(Array.from(await destination.read())).toEqual([3, 4, 5, 7, 2, 2]);
    device.defaultStream.copy([], none);
    expect(() => {
      device.defaultStream.copy([alone, numbers], destination);
    }).toThrow(ShapeError);
    expect(() => {
      device.defaultStream.copy([alone, part(0, 5), destination.slice('value', 0, 0)], destination.slice('value', 0, 6));
    }).not.toThrow();
    expect(() => {
      device.defaultStream.copy([alone, destination.slice('value', 0, 5)], destination);
    }).toThrow(InvalidValueError);
    using matrix = device.tensor('i32', ['row', 'value'], [2, 3]);
    expect(() => {
      device.defaultStream.copy([matrix.slice('value', 0, 1)], device.tensor('i32', ['row', 'value'], [2, 1]));
    }).toThrow(ShapeError);
  });

  it('refuse what does not fit', () => {
    const stream = device.defaultStream;
    using tensor = device.tensor('i32', ['value'], [2]);
    using other = device.tensor('f32', ['value'], [2]);
    using foreign = open().tensor('i32', ['value'], [2]);
    expect(() => {
      stream.write(tensor, new Int32Array(3));
    }).toThrow(ShapeError);
    expect(() => {
      stream.write(tensor, new Float32Array(2) as never);
    }).toThrow(DTypeError);
    expect(() => {
      stream.copy(tensor, other as never);
    }).toThrow(DTypeError);
    expect(() => {
      stream.copy(tensor, foreign);
    }).toThrow(DeviceError);
  });

  it('settle every pending wait when disposed', async () => {
    const stream = device.createStream();
    using tensor = device.tensor('u8', ['byte'], [1 << 24], new Uint8Array(1 << 24));
    using target = device.tensor('u8', ['byte'], [1 << 24]);
    for (let i = 0; i < 50; i++) stream.copy(tensor, target);
    const settled = Promise.allSettled([stream.synchronize(), tensor.read(stream)]);
    stream.dispose();
    for (const result of await settled) {
      if (result.status === 'rejected') expect(result.reason).toBeInstanceOf(DeviceError);
    }
    await expect(stream.synchronize()).rejects.toThrow(DisposedError);
  });
});
