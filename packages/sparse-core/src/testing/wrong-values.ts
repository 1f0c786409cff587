import { createElementArray, type DType, dtypes } from '../dtype.js';
import type { Device, MappedFile, Stream, Tensor } from '../handles.js';
import { isStream } from '../own-objects.js';
import { TensorObject } from '../tensor.js';

/** Something to put in the place of a right argument. */
export interface WrongValue {
  readonly name: string;
  readonly value?: unknown;
  /** Makes it of what is right. */
  readonly of?: ((right: unknown) => unknown) | undefined;
  /** What was made for it. */
  readonly owned?: readonly Disposable[] | undefined;
}

/** Where wrong values come from. */
export interface WrongSources {
  readonly device: Device;
  readonly stream: Stream;
  /** Devices that the tensors are not of. */
  readonly others: readonly Device[];
  /** Large enough for every tensor. */
  readonly file: MappedFile;
}

/** What no place wants, whatever it is for. */
function strangers(value: unknown): WrongValue[] {
  const proxied: WrongValue[] =
    typeof value === 'object' && value !== null && !Array.isArray(value) && Object.getPrototypeOf(value) !== Object.prototype
      ? [
          { name: 'a proxy', of: (right) => new Proxy(right as object, {}) },
          { name: 'a look-alike', value: Object.create(Object.getPrototypeOf(value) as object) },
        ]
      : [];
  return [
    { name: 'undefined', value: undefined },
    { name: 'null', value: null },
    { name: 'a symbol', value: Symbol('wrong') },
    { name: 'a bigint', value: 1n },
    { name: 'a function', value: () => 1 },
    { name: 'an object without prototype', value: Object.create(null) },
    ...proxied,
  ];
}

const notNumbers = (): WrongValue[] => [
  { name: "'1'", value: '1' },
  { name: 'true', value: true },
  { name: 'an object', value: {} },
  { name: 'an array', value: [1] },
];

const numbers: readonly number[] = [NaN, Infinity, -Infinity, -1, -0.5, 0.5, 2 ** 31 - 1, 2 ** 31, 2 ** 32, 2 ** 53, 1e300];

/** Wrong values for the place of a right one, which the function writes to or not. */
export function wrongValues(value: unknown, sources: WrongSources, written = false): WrongValue[] {
  const wrong = strangers(value);
  if (TensorObject.is(value)) return [...wrong, ...notNumbers(), { name: '1', value: 1 }, ...wrongTensors(value, sources, written)];
  if (isStream(value)) return [...wrong, ...notNumbers(), ...wrongStreams(sources)];
  if (Array.isArray(value)) return [...wrong, ...wrongLists(value)];
  switch (typeof value) {
    case 'number':
      return [...wrong, ...notNumbers(), ...numbers.map((given) => ({ name: String(given), value: given }))];
    case 'string':
      return [...wrong, { name: '5', value: 5 }, ...['', 'nonsense', 'constructor'].map((given) => ({ name: `'${given}'`, value: given }))];
    case 'boolean':
      return [...wrong, { name: '1', value: 1 }, { name: "'yes'", value: 'yes' }, { name: 'an object', value: {} }];
    default:
      return [...wrong, { name: '5', value: 5 }, { name: "'text'", value: 'text' }, { name: 'an empty array', value: [] }];
  }
}

function wrongLists({ length }: readonly unknown[]): WrongValue[] {
  const ofList = (name: string, of: (list: readonly unknown[]) => unknown): WrongValue => ({ name, of: (right) => of(right as unknown[]) });
  const lying = (target: readonly unknown[], key: string | symbol) => (key === 'length' ? 5e8 : (Reflect.get(target, key) as unknown));
  return [
    { name: '5', value: 5 },
    { name: "'text'", value: 'text' },
    { name: 'an object', value: {} },
    ...[5e8, -1, NaN, 2 ** 53].map((given) => ({ name: `a length of ${given}`, value: { length: given } })),
    ofList('a proxy that lies about its length', (list) => new Proxy(list, { get: lying })),
    ofList('one entry more', (list) => [...list, list.at(-1)]),
    ...(length > 0 ? [ofList('one entry fewer', (list) => list.slice(1)), { name: 'holes', value: new Array(length) }] : []),
  ];
}

function wrongStreams({ device, others }: WrongSources): WrongValue[] {
  const closed = device.createStream();
  closed.dispose();
  const foreign = others.map((other) => other.createStream());
  const tensor = device.tensor('f32', ['value'], [1], Float32Array.of(0));
  return [
    { name: 'a disposed stream', value: closed },
    ...foreign.map((stream, index) => ({ name: `a stream of another device (${device.kind} → ${others[index]?.kind ?? ''})`, value: stream, owned: [stream] })),
    { name: 'a tensor', value: tensor, owned: [tensor] },
    { name: 'a device', value: device },
  ];
}

/** A new tensor of zeros. */
function zeros(device: Device, dtype: DType, axes: readonly string[], shape: readonly number[]): Tensor {
  return device.tensor(dtype, axes, shape, createElementArray(dtype, shape.reduce((count, extent) => count * extent, 1)));
}

function wrongTensors({ dtype, axes, shape }: Tensor, { device, stream, others, file }: WrongSources, written: boolean): WrongValue[] {
  const fresh = (name: string, value: Tensor): WrongValue => ({ name, value, owned: [value] });
  const [rank, last] = [shape.length, shape.at(-1) ?? 0];
  const wrong = dtypes.filter((other) => other !== dtype).map((other) => fresh(other, zeros(device, other, axes, shape)));
  wrong.push(fresh('one axis more', zeros(device, dtype, [...axes, 'more'], [...shape, 1])));
  if (rank > 0) wrong.push(fresh('one axis fewer', zeros(device, dtype, axes.slice(1), shape.slice(1))));
  for (const [axis, extent] of shape.entries()) {
    for (const other of new Set([extent + 1, extent - 1, 0])) {
      if (other < 0 || other === extent) continue;
      wrong.push(fresh(`${axes[axis] ?? ''} = ${other}`, zeros(device, dtype, axes, shape.with(axis, other))));
    }
  }
  const disposed = zeros(device, dtype, axes, shape);
  const view = disposed.slice(axes[0] ?? '', 0, shape[0] ?? 0);
  disposed.dispose();
  wrong.push({ name: 'a disposed tensor', value: disposed }, { name: 'a view of a disposed tensor', value: view });
  for (const other of others) wrong.push(fresh(`a tensor of another device (${device.kind} → ${other.kind})`, zeros(other, dtype, axes, shape)));
  if (rank > 1) {
    const wide = zeros(device, dtype, axes, shape.with(rank - 1, last + 4));
    wrong.push({ name: 'gaps between rows', value: wide.slice(axes[rank - 1] ?? '', 0, last), owned: [wide] });
  }
  const twice = zeros(device, dtype, [...axes, 'gap'], [...shape, 2]);
  wrong.push({ name: 'gaps within rows', value: twice.slice('gap', 0, 1).view(axes, shape), owned: [twice] });
  // On a device with memory of its own a tensor over a file is a copy, which may be written.
  if (written && device.kind === 'cpu') wrong.push({ name: 'a mapped file', value: file.tensor(dtype, axes, shape, 0) });
  const bare = zeros(device, dtype, axes, shape);
  wrong.push({ name: 'a native tensor', value: bare.native, owned: [bare] }, { name: 'a stream', value: stream }, { name: 'a device', value: device });
  return wrong;
}
