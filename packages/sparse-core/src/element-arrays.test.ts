import { runInNewContext } from 'node:vm';
import { describe, expect, it } from 'vitest';
import { createDevice } from './device.js';
import { DisposedError, InvalidValueError, KvError } from './errors.js';

const device = createDevice({ threads: 2 });
const stream = device.defaultStream;
const length = 1000;

// TypeScript's library of this year does not know them.
interface Growing {
  resizable: new (bytes: number, options: { maxByteLength: number }) => ArrayBuffer & { resize(bytes: number): void };
  growable: new (bytes: number, options: { maxByteLength: number }) => SharedArrayBuffer & { grow(bytes: number): void };
}
const buffers = { resizable: ArrayBuffer, growable: SharedArrayBuffer } as unknown as Growing;
const resizable = (bytes: number, maxByteLength: number) => new buffers.resizable(bytes, { maxByteLength });
const growable = (bytes: number, maxByteLength: number) => new buffers.growable(bytes, { maxByteLength });

class Liar extends Float32Array {
  override get length(): number {
    return length;
  }
  override get byteLength(): number {
    return 4 * length;
  }
}

function detached(): Float32Array {
  const array = new Float32Array(length);
  structuredClone(array.buffer, { transfer: [array.buffer] });
  return array;
}

function shrunk(): Float32Array {
  const buffer = resizable(4 * length, 8 * length);
  const array = new Float32Array(buffer, 0, length);
  buffer.resize(16);
  return array;
}

/** What is taken for an array of 1,000 numbers, and has none or fewer. */
const refused: Record<string, () => unknown> = {
  'an array with a length of its own': () => new Liar(10),
  'an array whose length was overridden': () => Object.defineProperty(new Float32Array(10), 'length', { value: length }),
  'a proxy of an array': () => new Proxy(new Float32Array(length), {}),
  'an object of the same prototype': () => Object.create(Float32Array.prototype) as object,
  'an array-like': () => ({ length, byteLength: 4 * length, buffer: new ArrayBuffer(4 * length), byteOffset: 0 }),
  'a huge array-like': () => ({ length: 5e8 }),
  'a plain array': () => Array.from({ length }, () => 0),
  'a DataView': () => new DataView(new ArrayBuffer(4 * length)),
  'its buffer': () => new ArrayBuffer(4 * length),
  'another type': () => new Float64Array(length),
  null: () => null,
  'a string': () => 'x'.repeat(length),
  'a detached buffer': detached,
  'a buffer that shrank': shrunk,
};

describe.each(Object.keys(refused))('%s', (what) => {
  const make = refused[what] as () => Float32Array;

  it('is refused as contents of a tensor, as memory to wrap and as what is written', () => {
    const before = device.memory().live;
    using tensor = device.tensor('f32', ['value'], [length]);
    expect(() => device.tensor('f32', ['value'], [length], make())).toThrow(KvError);
    expect(() => device.wrap('f32', ['value'], [length], make())).toThrow(KvError);
    expect(() => {
      stream.write(tensor, make());
    }).toThrow(KvError);
    tensor.dispose();
    expect(device.memory().live).toBe(before);
  });

  it('is refused by native code too', () => {
    using tensor = device.tensor('f32', ['value'], [length]);
    const refusal = expect.objectContaining({ code: expect.stringMatching(/KV_(SHAPE|INVALID_VALUE)/) as string }) as Error;
    const { native } = device;
    if (what !== 'another type') {
      expect(() => native.allocate(0, [length], [1], 0, 4 * length, make())).toThrow(refusal);
      expect(() => native.wrap(0, [length], [1], 0, make())).toThrow(refusal);
    }
    expect(tensor.disposed).toBe(false);
  });
});

describe('an array', () => {
  it('may be of another context, or a subclass, or over a buffer that can grow', async () => {
    const buffer = resizable(8, 16);
    const shared = growable(8, 16);
    const fit: Float32Array[] = [
      runInNewContext('Float32Array.of(1, 2)') as Float32Array,
      new (class extends Float32Array {})([1, 2]),
      new Float32Array(buffer),
      new Float32Array(shared),
    ];
    for (const array of fit) {
      array.set([1, 2]);
      using tensor = device.tensor('f32', ['value'], [2], array);
      stream.write(tensor, array);
      expect(await tensor.read()).toEqual(Float32Array.of(1, 2));
    }
  });
});

describe('wrapped memory', () => {
  it('cannot be resized', () => {
    const buffer = resizable(16, 32);
    Object.defineProperty(buffer, 'resizable', { value: false });
    for (const memory of [new Float32Array(buffer, 0, 4), new Float32Array(buffer)]) {
      expect(() => device.wrap('f32', ['value'], [4], memory)).toThrow(InvalidValueError);
    }
  });

  it('may be shared memory that grows', async () => {
    const shared = growable(16, 1 << 20);
    using tensor = device.wrap('f32', ['value'], [4], new Float32Array(shared, 0, 4).fill(3));
    shared.grow(1 << 20);
    expect(await tensor.read()).toEqual(new Float32Array(4).fill(3));
  });

  it('stays where it is when its buffer is transferred', async () => {
    const memory = new Float32Array(1 << 16).fill(2);
    using tensor = device.wrap('f32', ['value'], [memory.length], memory);
    const reading = tensor.read();
    try {
      structuredClone(memory.buffer, { transfer: [memory.buffer] });
    } catch (error) {
      expect(error).toMatchObject({ name: 'DataCloneError' });
    }
    expect((await reading).every((value) => value === 2)).toBe(true);
    expect(memory.length).toBe(1 << 16);
    expect((await tensor.read()).every((value) => value === 2)).toBe(true);
  });

  it('can no longer be used once it is gone', async () => {
    // Growing detaches the buffer.
    const memory = runInNewContext('new WebAssembly.Memory({ initial: 1 })') as { buffer: ArrayBuffer; grow(pages: number): void };
    using tensor = device.wrap('f32', ['value'], [4], new Float32Array(memory.buffer, 0, 4));
    const view = tensor.slice('value', 1, 2);
    expect(await view.read()).toEqual(new Float32Array(1));
    memory.grow(1);
    await expect(tensor.read()).rejects.toThrow(DisposedError);
    await expect(view.read()).rejects.toThrow(DisposedError);
    expect(() => {
      stream.write(tensor, new Float32Array(4));
    }).toThrow(DisposedError);
    expect(() => tensor.slice('value', 0, 1)).toThrow(DisposedError);
  });
});
