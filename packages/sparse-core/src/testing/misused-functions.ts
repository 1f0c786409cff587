import { mkdtempSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import * as core from '../index.js';
import { aProxiedSignal, legalAcross, legalAt, legalTogether, optional } from './legal-values.js';
import type { MisusedFunction } from './misuse.js';

const withoutFields = (paths: string) => legalAt(paths, 'an empty array|an object without prototype', 'no option is given');

interface Elements {
  readonly dtype: 'f32';
  readonly axes: readonly string[];
  readonly shape: readonly number[];
  readonly data: Float32Array;
}
type Matrix = core.Tensor<'f32', readonly ['row', 'value']>;
const matrix = (device: core.Device): Matrix => device.tensor('f32', ['row', 'value'], [2, 3], Float32Array.of(1, 2, 3, 4, 5, 6));

/** A file of zeros, made once. */
let zeros: string | undefined;
function fileOfZeros(): string {
  if (zeros !== undefined) return zeros;
  zeros = join(mkdtempSync(join(tmpdir(), 'kv-misused-')), 'zeros');
  writeFileSync(zeros, new Uint8Array(64));
  return zeros;
}

/** What is made in its own time, and disposed of with the arguments. */
class Later<Made extends Disposable> implements Disposable {
  readonly made: Promise<Made>;

  constructor(made: Promise<Made>) {
    this.made = made;
  }

  [Symbol.dispose](): void {
    void this.made.then((made) => made[Symbol.dispose]());
  }
}

/** What is exported and is no operation: right calls of it. */
export const misusedFunctions: readonly MisusedFunction[] = [
  {
    name: 'createDevice',
    args: () => ({ options: { kind: 'cpu', threads: 1, memoryLimit: 1000, instructionSet: 'baseline', index: 0 } }),
    call: ({ options }: { options: core.DeviceOptions }) => void core.createDevice(options),
    legal: [
      optional('options|options\\.\\w+'),
      withoutFields('options'),
      legalAt('options\\.memoryLimit', '\\d{10}', 'any number of bytes'),
      legalAt('options\\.index', '.*', 'the CPU has no index'),
    ],
  },
  {
    name: 'createRowBatch',
    args: (device, stream) => ({ device, stream, entries: [{ slot: 0, position: 3, rows: 2 }, { slot: 1, position: 0, rows: 1 }] }),
    call: ({ device, stream, entries }: { device: core.Device; stream: core.Stream; entries: core.RowBatchEntry[] }) =>
      core.createRowBatch(device, stream, entries),
    legal: [
      legalAt('entries', 'one entry fewer', 'any number of entries'),
      legalAt('entries\\.\\d\\.(slot|position)', '2147483647', 'any i32'),
    ],
  },
  {
    name: 'kvPolicy',
    args: () => ({ parts: { prefill: core.densePrefill(), store: core.densePagedStore() } }),
    call: ({ parts }: { parts: core.KvPolicyParts }) => void core.kvPolicy(parts),
    legal: [
      optional('parts|parts\\.(prefill|store)|parts\\.prefill\\.expectStore'),
      withoutFields('parts'),
      legalAt('parts\\.\\w+\\.name', "'.*'", 'any name'),
      legalAt('parts\\.\\w+\\.(attend|create|expectStore)', 'a function', 'it is called later'),
    ],
  },
  {
    name: 'densePagedStore',
    args: (device) => ({
      options: { dtype: 'f16', blockTokens: 4 },
      layers: [{ index: 0, queryHeads: 2, kvHeads: 1, headDim: 8 }],
      capacity: { device: core.createDevice({ kind: device.kind, threads: 1, memoryLimit: 2 ** 20 }), slots: 2, tokensPerSlot: 16, tokens: 32 },
    }),
    call: ({ options, layers, capacity }: { options: core.DensePagedOptions; layers: core.KvLayer[]; capacity: core.KvCapacity }) => {
      for (const store of core.densePagedStore(options).create(layers, capacity)) store.dispose();
    },
    legal: [
      optional('options|options\\.\\w+'),
      withoutFields('options'),
      legalAt('layers', 'one entry (more|fewer)', 'any number of layers'),
      legalAt('layers\\.0\\.(index|queryHeads)', '\\d{10,16}|1e\\+300', 'nothing is made of it'),
      legalTogether('options\\.blockTokens|capacity\\.\\w+|layers', '\\d{10,16}|one entry fewer', 'without layers there are no blocks'),
    ],
  },
  {
    name: 'ropeDescription',
    args: () => ({
      options: { theta: 1e4, headDim: 8, rotaryDim: 4, scaling: { kind: 'linear', factor: 2 }, convention: 'halfSplit' },
    }),
    call: ({ options }: { options: core.RopeOptions }) => void core.ropeDescription(options),
    legal: [
      optional('options\\.(rotaryDim|scaling|convention)'),
      legalAt('options\\.(theta|scaling\\.factor)', '0\\.5|\\d{10,16}|1e\\+300', 'any positive number'),
    ],
  },
  {
    name: 'Device.tensor',
    args: (device) => ({ self: device, dtype: 'f32', axes: ['row', 'value'], shape: [2, 3], data: new Float32Array(6) }),
    call: ({ self, dtype, axes, shape, data }: Elements & { self: core.Device }) => self.tensor(dtype, axes, shape, data),
    legal: [
      optional('data'),
      legalAt('axes\\.\\d', "'.*'", 'any name'),
      legalTogether('data|shape\\.\\d', 'undefined|absent|\\d{10}', 'there is room for some gigabytes'),
    ],
  },
  {
    name: 'Device.wrap',
    args: (device) => ({ self: device, dtype: 'f32', axes: ['row', 'value'], shape: [2, 3], data: new Float32Array(6) }),
    call: ({ self, dtype, axes, shape, data }: Elements & { self: core.Device }) => self.wrap(dtype, axes, shape, data),
    legal: [legalAt('axes\\.\\d', "'.*'", 'any name')],
  },
  {
    name: 'Tensor.slice',
    args: (device) => ({ self: matrix(device), axis: 'value', start: 1, end: 2 }),
    call: ({ self, axis, start, end }: { self: Matrix; axis: 'value'; start: number; end: number }) =>
      void self.slice(axis, start, end),
  },
  {
    name: 'Tensor.view',
    args: (device) => ({ self: matrix(device), axes: ['all'], shape: [6] }),
    call: ({ self, axes, shape }: { self: Matrix; axes: string[]; shape: number[] }) => void self.view(axes, shape),
    legal: [legalAt('axes\\.\\d', "'.*'", 'any name')],
  },
  {
    name: 'Tensor.read',
    args: (device, stream) => ({ self: matrix(device), stream }),
    call: ({ self, stream }: { self: Matrix; stream: core.Stream }) => self.read(stream),
    legal: [optional('stream'), legalAcross('stream', 'a stream', 'cpu → cuda', 'a GPU copies to a tensor of the CPU, which is read behind that')],
  },
  {
    name: 'Stream.write',
    args: (device, stream) => ({ self: stream, tensor: matrix(device), source: new Float32Array(6) }),
    call: ({ self, tensor, source }: { self: core.Stream; tensor: Matrix; source: Float32Array }) => self.write(tensor, source),
    outputs: ['tensor'],
    legal: [legalAt('tensor', 'one axis more', 'as many elements')],
  },
  {
    name: 'Stream.copy',
    args: (device, stream) => ({ self: stream, source: matrix(device), destination: matrix(device) }),
    call: ({ self, source, destination }: { self: core.Stream; source: Matrix; destination: Matrix }) =>
      self.copy(source, destination),
    outputs: ['destination'],
    legal: [
      legalAt('source|destination', 'one axis more', 'as many elements'),
      legalAt('source', 'gaps (between|within) rows', 'it may have gaps'),
      legalAcross('source|destination', 'a tensor', 'cuda → cpu', 'a GPU copies from and to the CPU'),
      legalTogether('source|destination', 'one axis fewer|row = 1', 'three elements each'),
      legalTogether('source|destination', '(row|value) = 0', 'no elements'),
    ],
  },
  {
    name: 'Stream.record',
    args: (device, stream) => ({ self: stream, enqueue: () => stream.device }),
    call: ({ self, enqueue }: { self: core.Stream; enqueue: () => unknown }) => self.record(enqueue),
    legal: [legalAt('enqueue', 'a function', 'it enqueues nothing')],
  },
  {
    name: 'Stream.replay',
    args: (device, stream) => ({ self: stream, recording: stream.record(() => undefined) }),
    call: ({ self, recording }: { self: core.Stream; recording: core.Recording }) => {
      self.replay(recording);
    },
  },
  {
    name: 'Stream.waitFor',
    args: (device, stream) => ({ self: stream, other: device.createStream(), options: { takesFailure: false } }),
    call: ({ self, other, options }: { self: core.Stream; other: core.Stream; options: core.WaitOptions }) => {
      self.waitFor(other, options);
    },
    legal: [optional('options|options\\.takesFailure'), withoutFields('options')],
  },
  {
    name: 'Device.createStream',
    args: (device) => ({ self: device, options: { onFailure: () => undefined } }),
    call: ({ self, options }: { self: core.Device; options: core.StreamOptions }) => self.createStream(options),
    legal: [optional('options|options\\.onFailure'), withoutFields('options'), legalAt('options\\.onFailure', 'a function', 'it is called')],
  },
  {
    name: 'byteSize',
    args: () => ({ dtype: 'f32' }),
    call: ({ dtype }: { dtype: core.DType }) => void core.byteSize(dtype),
  },
  {
    name: 'Device.hostTensor',
    args: (device) => ({ self: device, dtype: 'f32', axes: ['row', 'value'], shape: [200, 300] }),
    call: ({ self, dtype, axes, shape }: Elements & { self: core.Device }) => self.hostTensor(dtype, axes, shape),
    legal: [legalAt('axes\\.\\d', "'.*'", 'any name')],
  },
  {
    name: 'Device.mapFile',
    args: (device) => ({ self: device, path: fileOfZeros() }),
    call: ({ self, path }: { self: core.Device; path: string }) => self.mapFile(path),
  },
  {
    name: 'MappedFile.tensor',
    args: (device) => ({ self: new Later(device.mapFile(fileOfZeros())), dtype: 'f32', axes: ['row', 'value'], shape: [2, 3], byteOffset: 8 }),
    call: async ({ self, dtype, axes, shape, byteOffset }: Elements & { self: Later<core.MappedFile>; byteOffset: number }) => {
      (await self.made).tensor(dtype, axes, shape, byteOffset);
    },
    legal: [legalAt('axes\\.\\d', "'.*'", 'any name')],
  },
  {
    name: 'hostPool',
    args: () => ({
      // A GPU would pin gibibytes for the larger numbers.
      device: core.createDevice({ threads: 1, memoryLimit: 2 ** 20 }),
      options: { bytes: 4096, onProgress: () => undefined, signal: new AbortController().signal },
    }),
    call: ({ device, options }: { device: core.Device; options: core.HostPoolOptions }) => core.hostPool(device, options),
    legal: [
      optional('options\\.(onProgress|signal)'),
      legalAt('options\\.onProgress', 'a function', 'it is called'),
      aProxiedSignal('options\\.signal'),
    ],
  },
  {
    name: 'HostPool.tensor',
    args: (device) => ({ self: new Later(core.hostPool(device, { bytes: 4096 })), dtype: 'f32', axes: ['row', 'value'], shape: [2, 3] }),
    call: async ({ self, dtype, axes, shape }: Elements & { self: Later<core.HostPool> }) => (await self.made).tensor(dtype, axes, shape),
    legal: [legalAt('axes\\.\\d', "'.*'", 'any name')],
  },
];

const foreign = 'src/foreign-objects.test.ts forges it';
const askedOfAnything = 'says of anything what it is';
const nothing = 'takes nothing';
const own = 'what the operations of this package call, behind their checks';

/** What cannot be misused, and why, or where else it is tried. */
export const harmlessExports: Readonly<Record<string, string>> = {
  ...Object.fromEntries(['Device', 'HostPool', 'MappedFile', 'Recording', 'Stream', 'Tensor'].map((name) => [name, foreign])),
  ...Object.fromEntries(['HostPool', 'Recording', 'Tensor'].map((name) => [`${name}.is`, askedOfAnything])),
  ...Object.fromEntries(['HostPool', 'MappedFile', 'Recording', 'Stream', 'Tensor'].map((name) => [`${name}.dispose`, nothing])),
  'Device.memory': nothing,
  'Device.memoryStreams': nothing,
  'Device.prefetchCache': nothing,
  'Device.prefetchRequests': nothing,
  'MappedFile.assertUnchanged': nothing,
  'Stream.assertUsable': nothing,
  'Stream.progress': nothing,
  'Stream.synchronize': nothing,
  'Stream.waited': own,
  'Tensor.assertUsable': nothing,
  'Tensor.derive': own,
  'Tensor.writtenBy': own,
  'Recording.nativeOn': own,
  cudaReport: nothing,
  devices: nothing,
  nativeBinary: nothing,
  densePrefill: nothing,
  roundToBf16: 'gives NaN for what is no number, as Math.fround does',
};
