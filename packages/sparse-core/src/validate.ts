import type { DType } from './dtype.js';
import { DeviceError, DTypeError, InvalidValueError, KvError, ShapeError } from './errors.js';
import { show } from './show.js';
import type { TensorHandle } from './handles.js';
import { isContiguous, rowMajorStrides } from './layout.js';
import { describe, type TensorObject } from './tensor.js';

/** @throws InvalidValueError unless it is an object, whose fields can be read */
export function expectObject(operation: string, name: string, given: unknown): asserts given is object {
  if (typeof given === 'object' && given !== null) return;
  throw new InvalidValueError(`${operation}: ${name} is ${show(given)}; an object is wanted.`, { subject: name, given });
}

/** Every name of a type of options, which the compiler sees to. */
export type OptionNames<Options> = Readonly<Record<keyof Options, true>>;

/**
 * Refuses names that there are not: what was mistyped would be a default that nobody asked for.
 * @throws InvalidValueError unless it is an object with none but these names
 */
export function expectOptions<Options extends object>(operation: string, given: Options, names: OptionNames<Options>): void {
  expectObject(operation, 'options', given);
  const stranger = Object.keys(given).find((name) => !Object.hasOwn(names, name));
  if (stranger === undefined) return;
  const wanted = Object.keys(names);
  throw new InvalidValueError(`${operation}: there is no option ${show(stranger)}; there are ${wanted.join(', ')}.`, {
    subject: stranger,
    given: stranger,
    wanted,
  });
}

/** @throws InvalidValueError unless it holds */
export function expectThat(operation: string, name: string, given: unknown, holds: boolean, wanted: string): void {
  if (holds) return;
  throw new InvalidValueError(`${operation}: ${name} is ${show(given)}; it must be ${wanted}.`, {
    subject: name,
    given,
    wanted,
  });
}

/** Whether it is a number that is finite as the kernels keep it. */
export function isFinite32(given: unknown): given is number {
  return typeof given === 'number' && Number.isFinite(Math.fround(given));
}

/** @throws InvalidValueError unless it is a boolean */
export function expectBoolean(operation: string, name: string, given: unknown): void {
  expectThat(operation, name, given, typeof given === 'boolean', 'true or false');
}

/** @throws InvalidValueError unless it is undefined or a signal that can be asked whether it was aborted, and listened to */
export function expectSignal(operation: string, given: unknown): asserts given is AbortSignal | undefined {
  expectThat(operation, 'signal', given, given === undefined || isSignal(given), 'an AbortSignal');
}

function isSignal(given: unknown): boolean {
  try {
    const signal = given as AbortSignal;
    const methods = ['throwIfAborted', 'addEventListener', 'removeEventListener'] as const;
    return typeof signal.aborted === 'boolean' && methods.every((name) => typeof signal[name] === 'function');
  } catch {
    // What only looks like one throws when it is asked.
    return false;
  }
}

/** @throws InvalidValueError unless it is undefined or a function */
export function expectCallback(operation: string, name: string, given: unknown): void {
  expectThat(operation, name, given, given === undefined || typeof given === 'function', 'a function');
}

/**
 * A list of at most so many entries, copied: whoever gave it cannot change it behind the checks, and one that lies about
 * its length takes no time.
 * @throws InvalidValueError
 */
export function listOf<T>(operation: string, name: string, given: ArrayLike<T>, most: number): T[] {
  expectObject(operation, name, given);
  return reading(`${operation}: ${name}`, () => {
    const { length } = given;
    expectThat(operation, name, given, Number.isInteger(length) && length >= 0 && length <= most, `a list of at most ${most}`);
    // Lists of blocks are long, and Array.from with a function is slow.
    const list: T[] = [];
    for (let index = 0; index < length; index++) list.push(given[index] as T);
    return list;
  });
}

/**
 * What a caller's object answers, whatever it is: its own errors become ours.
 * @param name of the object, for messages
 * @throws InvalidValueError, and the errors of this project that `read` throws
 */
export function reading<Result>(name: string, read: () => Result): Result {
  try {
    return read();
  } catch (cause) {
    if (cause instanceof KvError) throw cause;
    throw new InvalidValueError(`${name} could not be read. Give an array or a typed array.`, { subject: name, cause });
  }
}

/**
 * A list of one entry for each of an axis, copied.
 * @throws ShapeError when there are more or fewer, InvalidValueError when it is no list
 */
export function listFor<T>(operation: string, name: string, given: ArrayLike<T>, axis: string, extent: number): T[] {
  expectObject(operation, name, given);
  if (given.length === extent) return listOf(operation, name, given, extent);
  throw new ShapeError(
    `${operation}: ${name} has ${show(given.length)} entries, and there are ${extent} of ${axis}; give one for each.`,
    { subject: name, given: given.length, wanted: extent },
  );
}

/** @throws InvalidValueError unless all are whole numbers from 0 to `end - 1` */
export function expectIndices(operation: string, name: string, given: readonly number[], end: number): void {
  const outside = given.findIndex((index) => !Number.isInteger(index) || index < 0 || index >= end);
  expectThat(operation, name, given[outside], outside === -1, `whole numbers from 0 to ${end - 1}`);
}

/** Whether a list names a number twice, or one that `others` name too. Marking them would take memory for all numbers that there may be. */
export function hasRepeated(numbers: readonly number[], others: readonly number[] = []): boolean {
  const [own, foreign] = [ascending(numbers), ascending(others)];
  let next = 0;
  for (let index = 0; index < own.length; index++) {
    const number = own[index] ?? NaN;
    while ((foreign[next] ?? Infinity) < number) next += 1;
    if (number === own[index - 1] || number === foreign[next]) return true;
  }
  return false;
}

/** Lists of blocks mostly ascend already. */
function ascending(numbers: readonly number[]): Int32Array {
  const list = new Int32Array(numbers);
  for (let index = 1; index < list.length; index++) {
    if ((list[index] ?? NaN) < (list[index - 1] ?? NaN)) return list.sort();
  }
  return list;
}

/** Two lists of whole numbers, one behind the other. */
export function joined(first: readonly number[], second: readonly number[]): Int32Array<ArrayBuffer> {
  const all = new Int32Array(first.length + second.length);
  all.set(first);
  all.set(second, first.length);
  return all;
}

/** @throws InvalidValueError when nothing may be written to it */
export function expectWritable(operation: string, name: string, tensor: TensorHandle): void {
  if (!tensor.readOnly) return;
  throw new InvalidValueError(
    `${operation}: ${name} is ${describe(tensor)} over a file that was mapped, which is read-only; ` +
      'give a tensor of device.tensor() to write to.',
    { subject: name },
  );
}

/** @throws DeviceError when the device's kernels cannot reach its memory */
export function expectReachable(operation: string, name: string, tensor: TensorObject | undefined): void {
  if (tensor?.hostOnly !== true) return;
  throw new DeviceError(
    `${operation}: ${name} is ${describe(tensor)} over memory that was wrapped, which ${tensor.device.name} does not reach. ` +
      'Copy it to a tensor of device.tensor() or device.hostTensor() first.',
    { subject: name },
  );
}

/** @throws DTypeError unless the tensor's dtype is among `wanted` */
export function expectDType(operation: string, name: string, tensor: TensorHandle, wanted: readonly DType[]): void {
  if (!wanted.includes(tensor.dtype)) {
    throw new DTypeError(`${operation}: ${name} is ${describe(tensor)}; its dtype must be ${wanted.join(', ')}.`, {
      subject: name,
      given: tensor.dtype,
      wanted,
    });
  }
}

/** @throws ShapeError unless the tensor has exactly this shape; `undefined` accepts any extent */
export function expectShape(
  operation: string,
  name: string,
  tensor: TensorHandle,
  wanted: readonly (number | undefined)[],
): void {
  const fits =
    tensor.shape.length === wanted.length &&
    wanted.every((extent, axis) => extent === undefined || tensor.shape[axis] === extent);
  if (!fits) {
    const extents = wanted.map((extent) => (extent === undefined ? 'any' : String(extent)));
    throw new ShapeError(`${operation}: ${name} is ${describe(tensor)}; its shape must be [${extents.join(', ')}].`, {
      subject: name,
      given: tensor.shape,
      wanted,
    });
  }
}

/** @throws ShapeError unless the elements of the last axis lie next to each other */
export function expectContiguousRows(operation: string, name: string, tensor: TensorHandle): void {
  const last = tensor.shape.length - 1;
  if ((tensor.shape[last] ?? 0) > 1 && tensor.strides[last] !== 1) {
    throw new ShapeError(
      `${operation}: ${name} is ${describe(tensor)} with strides [${tensor.strides.join(', ')}]; ` +
        'its last axis must be contiguous. Copy it first.',
      { subject: name, given: tensor.strides, wanted: 1 },
    );
  }
}

/** @throws ShapeError unless the elements lie in row-major order without gaps */
export function expectContiguous(operation: string, name: string, tensor: TensorHandle): void {
  if (isContiguous(tensor.shape, tensor.strides)) return;
  throw new ShapeError(
    `${operation}: ${name} is ${describe(tensor)} with strides [${tensor.strides.join(', ')}]; ` +
      'it must be contiguous. Copy it first.',
    { subject: name, given: tensor.strides, wanted: rowMajorStrides(tensor.shape) },
  );
}

/** @throws ShapeError unless both tensors are laid out alike */
export function expectSameStrides(operation: string, name: string, tensor: TensorHandle, other: TensorHandle): void {
  if (tensor.strides.some((stride, axis) => stride !== other.strides[axis] && (tensor.shape[axis] ?? 0) > 1)) {
    throw new ShapeError(
      `${operation}: ${name} has the strides [${tensor.strides.join(', ')}]; they must be ` +
        `[${other.strides.join(', ')}], like those of its partner.`,
      { subject: name, given: tensor.strides, wanted: other.strides },
    );
  }
}
