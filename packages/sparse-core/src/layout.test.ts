import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { createDevice } from './device.js';
import { OutOfMemoryError, ShapeError } from './errors.js';
import type { MappedFile } from './handles.js';

const device = createDevice({ threads: 2 });

/** Shapes of three axes that no tensor can have. */
const malformed: Record<string, unknown> = {
  'a negative extent': [2, -3, 4],
  'a fraction': [2, 1.5, 4],
  NaN: [NaN, 1, 1],
  infinity: [Infinity, 1, 1],
  'no elements, and rows without end': [2 ** 53 - 1, 0, 1],
  'an extent that is no number': ['2', 3, 4],
  'an extent that becomes one': [{ valueOf: () => 2 }, 3, 4],
  'a hole': Object.assign(new Array(3), { 0: 2, 2: 4 }),
  'an array-like': { 0: 2, 1: 3, 2: 4, length: 3 },
  'a typed array': Int32Array.of(2, 3, 4),
  'no array': 24,
  null: null,
  'fewer extents than axes': [6, 4],
  'more extents than axes': [2, 3, 4, 1],
  'a proxy with a length of its own': new Proxy([2, 3, 4], {
    get: (target, name) => (name === 'length' ? 5e8 : (Reflect.get(target, name) as unknown)),
  }),
};

const malformedAxes: Record<string, unknown> = {
  'one name twice': ['token', 'head', 'token'],
  'a name that is no string': ['token', 7, 'dim'],
  'no names': undefined,
};

describe('a shape', () => {
  const axes = ['token', 'head', 'dim'] as const;

  /** Everything that a shape can be given to. */
  const makers: Record<string, (axes: never, shape: never) => unknown> = {
    tensor: (names, shape) => device.tensor('f32', names, shape),
    'tensor with contents': (names, shape) => device.tensor('f32', names, shape, new Float32Array(24)),
    wrap: (names, shape) => device.wrap('f32', names, shape, new Float32Array(24)),
    view: (names, shape) => device.tensor('f32', ['element'], [24]).view(names, shape),
    'mapped file': (names, shape) => mapped.tensor('f32', names, shape, 0),
  };
  let mapped: MappedFile;
  let folder: string;

  beforeAll(async () => {
    folder = mkdtempSync(join(tmpdir(), 'kv-shape-'));
    writeFileSync(join(folder, 'file'), new Uint8Array(96));
    mapped = await device.mapFile(join(folder, 'file'));
  });

  afterAll(() => {
    mapped.dispose();
    rmSync(folder, { recursive: true });
  });

  for (const [maker, make] of Object.entries(makers)) {
    it.each(Object.keys(malformed))(`of ${maker} is refused: %s`, (what) => {
      expect(() => make(axes as never, malformed[what] as never)).toThrow(ShapeError);
    });

    it.each(Object.keys(malformedAxes))(`of ${maker} needs axes of distinct names: %s`, (what) => {
      expect(() => make(malformedAxes[what] as never, [2, 3, 4] as never)).toThrow(ShapeError);
    });

    it(`of ${maker} has at most six axes`, () => {
      const many = ['a', 'b', 'c', 'd', 'e', 'f', 'g'];
      expect(() => make(many as never, [24, 1, 1, 1, 1, 1, 1] as never)).toThrow(ShapeError);
      expect(() => make(many.slice(1) as never, [24, 1, 1, 1, 1, 1] as never)).not.toThrow();
    });
  }

  it('of more elements than a number counts fits no memory, and nothing that there is', () => {
    const shape = [2 ** 40, 2 ** 40, 1] as const;
    expect(() => device.tensor('f32', axes, shape)).toThrow(OutOfMemoryError);
    for (const maker of ['tensor with contents', 'wrap', 'view', 'mapped file']) {
      expect(() => makers[maker]?.(axes as never, shape as never), maker).toThrow(ShapeError);
    }
  });

  it('may have no elements, and be a scalar', async () => {
    expect(await device.tensor('f32', ['token', 'dim'], [2 ** 20, 0]).read()).toEqual(new Float32Array(0));
    expect(await device.tensor('f32', [], [], Float32Array.of(5)).read()).toEqual(Float32Array.of(5));
  });

  it('stays what it was when the caller changes the arrays that it gave', async () => {
    const [names, shape]: [[string, string], [number, number]] = [['token', 'dim'], [2, 3]];
    using tensor = device.tensor('f32', names, shape, Float32Array.of(0, 1, 2, 3, 4, 5));
    const viewed: [number, number] = [3, 2];
    const view = tensor.view(names, viewed);
    for (const array of [shape, viewed]) array[0] = 1e9;
    names[0] = 'other';
    expect([tensor.axes, tensor.shape, view.shape]).toEqual([['token', 'dim'], [2, 3], [3, 2]]);
    expect(Array.from(await tensor.slice('token', 1, 2).read())).toEqual([3, 4, 5]);
    expect(() => tensor.slice('token', 1, 1e6)).toThrow(ShapeError);
  });

  it('cannot be changed on the handle', () => {
    using tensor = device.tensor('f32', ['token', 'dim'], [2, 3]);
    const open = tensor as unknown as { shape: number[]; strides: number[]; axes: string[]; dtype: string; native: object };
    expect(() => (open.shape[0] = 1e6)).toThrow(TypeError);
    expect(() => (open.strides[0] = 1e6)).toThrow(TypeError);
    expect(() => (open.axes[0] = 'head')).toThrow(TypeError);
    expect(() => (open.shape = [1e6, 1e6])).toThrow(TypeError);
    expect(() => (open.native = {})).toThrow(TypeError);
  });

  it('is held against the memory by native code too', () => {
    using tensor = device.tensor('f32', ['value'], [10]);
    const refused: unknown[][] = [
      [0, [11], [1], 0],
      [0, [2], [10], 0],
      [0, [10], [1], 4],
      [0, [1], [1], 40],
      [0, [1], [1], -4],
      [0, [1], [1], 2],
      [0, [1e9], [0], 64],
      [0, [2 ** 53 - 1, 2 ** 53 - 1], [2 ** 53 - 1, 1], 0],
      [0, [-1], [1], 0],
      [0, [0.5], [1], 0],
      [0, [1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], 0],
      [0, [2, 2], [1], 0],
      [0, 'ten', [1], 0],
      [0, ['1'], [1], 0],
      [9, [1], [1], 0],
      [-1, [1], [1], 0],
      [],
    ];
    for (const layout of refused) {
      expect(() => tensor.native.view(...(layout as Parameters<typeof tensor.native.view>)), String(layout)).toThrow(expect.objectContaining({ code: 'KV_SHAPE' }));
    }
    expect(() => device.native.allocate(0, [11], [1], 0, 40, undefined)).toThrow(/past the memory/);
    expect(() => device.native.wrap(0, [11], [1], 0, new Float32Array(10))).toThrow(/past the memory/);
  });
});
