import { describe, expect, it } from 'vitest';
import type { NativeDevice, NativeRecording, NativeStream, NativeTensor } from './native-handles.js';
import { createDevice, DeviceObject } from './device.js';
import type { Recording, Stream } from './handles.js';
import * as core from './index.js';
import { DeviceError, InvalidValueError, KvError } from './errors.js';
import { loadAddon } from './load-addon.js';
import { MappedFileObject } from './mapped-file.js';
import { rmsNorm, type RmsNormArguments } from './operations/rms-norm.js';
import { RecordingObject } from './recording.js';
import { StreamObject } from './stream.js';
import { TensorObject } from './tensor.js';

const device = createDevice({ threads: 2 });
const stream = device.defaultStream;

const refusal = expect.objectContaining({ code: 'KV_INVALID_VALUE' }) as Error;

describe('native code', () => {
  const addon = loadAddon();
  const tensor = device.tensor('f32', ['token', 'feature'], [1, 4], new Float32Array(4));
  stream.native.beginRecording();
  const natives: Record<string, object> = {
    device: device.native,
    stream: stream.native,
    tensor: tensor.native,
    recording: stream.native.endRecording(),
  };
  const strangers: Record<string, unknown> = {
    'an empty object': {},
    nothing: undefined,
    null: null,
    'a number': 7,
    'a function': () => 7,
    'an object with the same prototype': Object.create(Object.getPrototypeOf(tensor.native) as object) as object,
    'an object that inherits': Object.create(tensor.native) as object,
    'an object of another class': new Map(),
  };
  for (const [kind, native] of Object.entries(natives)) {
    strangers[`a proxy of a ${kind}`] = new Proxy(native, {});
    strangers[`a copy of a ${kind}`] = { ...native };
  }

  const takers: Record<string, (given: never) => unknown> = {
    stream: (given: NativeStream) => addon.rmsNorm(given, tensor.native, tensor.native, tensor.native, 1),
    tensor: (given: NativeTensor) => addon.rmsNorm(stream.native, given, tensor.native, tensor.native, 1),
    'tensor that is written': (given: NativeTensor) =>
      addon.rmsNorm(stream.native, tensor.native, tensor.native, given, 1),
    recording: (given: NativeRecording) => stream.native.replay(given),
    device: (given: NativeDevice) => addon.mapFile(given, '/dev/null'),
  };
  for (const [taker, take] of Object.entries(takers)) {
    const wanted = taker.split(' ')[0];
    it.each(Object.keys(natives).filter((kind) => kind !== wanted))(`wants a ${taker} and not a %s`, (kind) => {
      expect(() => take(natives[kind] as never)).toThrow(refusal);
    });
    it.each(Object.keys(strangers))(`wants a ${taker} and not %s`, (what) => {
      expect(() => take(strangers[what] as never)).toThrow(refusal);
    });
  }

  it('gives what nobody made no memory', () => {
    const Native = (tensor.native as object).constructor as new () => NativeTensor;
    const empty = new Native();
    expect(() => addon.rmsNorm(stream.native, empty, empty, empty, 1)).toThrow(
      expect.objectContaining({ code: 'KV_DISPOSED' }),
    );
    expect(() => empty.view(0, [1], [1], 0)).toThrow(expect.objectContaining({ code: 'KV_DISPOSED' }));
  });

  it('keeps methods to their kind', () => {
    for (const other of [{}, stream.native, new Proxy(tensor.native, {})]) {
      expect(() => tensor.native.view.call(other as NativeTensor, 0, [1], [1], 0)).toThrow(TypeError);
    }
  });
});

describe('operations', () => {
  const real = device.tensor('f32', ['token', 'feature'], [1, 4], new Float32Array(4));
  const weight = device.tensor('f32', ['feature'], [4], new Float32Array(4));
  const args: RmsNormArguments<'f32', readonly ['token', 'feature']> = { input: real, weight, output: real, epsilon: 1 };

  const lookAlikes: Record<string, unknown> = {
    'a proxy': new Proxy(real, {}),
    'its fields': Object.assign({}, real),
    'its prototype': Object.assign(Object.create(TensorObject.prototype) as object, { shape: [1, 4], device }),
    'one that inherits': Object.create(real, { shape: { value: [1000, 4] } }) as object,
    'an empty object': {},
    nothing: undefined,
    null: null,
    'a stream': stream,
  };

  it.each(Object.keys(lookAlikes))('refuse %s as a tensor', async (what) => {
    const fake = lookAlikes[what] as typeof real;
    expect(() => {
      rmsNorm(stream, { ...args, input: fake });
    }).toThrow(KvError);
    expect(() => {
      stream.write(fake, new Float32Array(4));
    }).toThrow(KvError);
    expect(() => {
      stream.copy(real, fake);
    }).toThrow(KvError);
    expect(() => {
      stream.copy(fake, real);
    }).toThrow(KvError);
    await expect(TensorObject.prototype.read.call(fake, stream)).rejects.toThrow(KvError);
  });

  const fakeStreams: Record<string, unknown> = {
    'a proxy': new Proxy(stream, {}),
    'its native half': stream.native,
    'a forged native half': { device, native: real.native },
    'a tensor': real,
    null: null,
  };

  it.each(Object.keys(fakeStreams))('refuse %s as a stream', async (what) => {
    const fake = fakeStreams[what] as Stream;
    expect(() => {
      rmsNorm(fake, args);
    }).toThrow(DeviceError);
    expect(() => {
      stream.waitFor(fake);
    }).toThrow(DeviceError);
    await expect(real.read(fake)).rejects.toThrow(DeviceError);
  });

  it('refuse what is no recording', () => {
    using recording = stream.record(() => undefined);
    for (const fake of [{}, undefined, new Proxy(recording, {}), { nativeOn: () => real.native }]) {
      expect(() => {
        stream.replay(fake as Recording);
      }).toThrow(InvalidValueError);
    }
    expect(() => stream.record(7 as never)).toThrow(InvalidValueError);
    stream.replay(recording);
  });

  it('work as before beside all this', async () => {
    stream.write(real, Float32Array.of(1, 1, 1, 1));
    expect(await real.read()).toEqual(Float32Array.of(1, 1, 1, 1));
  });
});

describe('a read', () => {
  it('refuses a stream of another device', async () => {
    const other = createDevice({ threads: 1 });
    using tensor = device.tensor('f32', ['value'], [1]);
    await expect(tensor.read(other.defaultStream)).rejects.toThrow(DeviceError);
  });
});

describe('what only this package makes', () => {
  const classes = [DeviceObject, core.HostPool, MappedFileObject, RecordingObject, StreamObject, TensorObject];
  it.each(classes)('$name is not made of parts', (Class) => {
    const device = core.createDevice({ threads: 1 });
    const { native } = device.tensor('f32', ['value'], [1], Float32Array.of(1));
    const parts = { device, native, dtype: 'f32', axes: ['value'], shape: [1000], strides: [1], byteOffset: 0 };
    for (const given of [[], [parts], [device, native], [Symbol('made by @kv/sparse-core'), parts], ['cpu', 1, device.native]]) {
      expect(() => Reflect.construct(Class, given) as unknown).toThrow(core.InvalidValueError);
    }
  });
});
