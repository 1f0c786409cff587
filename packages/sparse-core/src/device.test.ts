import { describe, expect, it } from 'vitest';
import { createDevice, type DeviceOptions } from './device.js';
import { InvalidValueError, KvError, OutOfMemoryError } from './errors.js';

describe('a device', () => {
  const options: Record<string, unknown> = {
    threads: [0, -1, 1.5, NaN, 2 ** 31 - 1, 2 ** 53, '2', null, [2 ** 53 - 1, 0]],
    index: [-1, 0.5, 2 ** 31, 2 ** 53, '0', null, {}],
    memoryLimit: [-1, 0.5, Infinity, '1', [2 ** 53 - 1, 0], null],
    instructionSet: [5, null, {}, 'sse9', ''],
    memoryStreams: [0, 3, 8, -1, 1.5, NaN, '2', null, {}],
    kind: ['', 7, null, Symbol('cpu'), { toString: () => 'cpu' }],
  };
  for (const [option, values] of Object.entries(options)) {
    it(`refuses other values of ${option} than it has`, () => {
      for (const value of values as unknown[]) expect(() => createDevice({ [option]: value })).toThrow(KvError);
    });
  }

  it('refuses options that are none', () => {
    for (const value of [null, 7, 'cuda']) expect(() => createDevice(value as never)).toThrow(InvalidValueError);
    expect(() => createDevice({ thread: 2 } as never)).toThrow(/^createDevice: there is no option 'thread'; there are kind, .*threads, /);
  });

  it('reads as many streams of memory as it is told, or as is measured', async () => {
    for (const memoryStreams of [1, 2, 4] as const) {
      expect(await createDevice({ threads: 1, memoryStreams }).memoryStreams()).toBe(memoryStreams);
    }
    const [first, second] = await Promise.all([1, 2].map((threads) => createDevice({ threads }).memoryStreams()));
    expect([1, 2, 4]).toContain(first);
    expect(second).toBe(first);
  });

  it('asks for memory as is measured to be fastest, and once in the first cache if it is told how many rows to read', async () => {
    const requests = async (options: DeviceOptions) => {
      const device = createDevice(options);
      return [await device.prefetchCache(), await device.prefetchRequests()];
    };
    const [first, second, told] = await Promise.all([requests({ threads: 2 }), requests({ threads: 1 }), requests({ threads: 1, memoryStreams: 4 })]);
    expect([[1, 1], [2, 1], [2, 6]]).toContainEqual(first);
    expect(second).toEqual(first);
    expect(told).toEqual([1, 1]);
  });

  it('has a limit as large as a number', () => {
    expect(createDevice({ threads: 1, memoryLimit: 2 ** 53 - 1 }).memory().limit).toBe(2 ** 53 - 1);
    expect(() => createDevice({ threads: 1 }).tensor('f32', ['value'], [2 ** 53 - 1])).toThrow(OutOfMemoryError);
  });
});
