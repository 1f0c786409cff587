import { types } from 'node:util';
import { DTypeError, ShapeError } from './errors.js';
import { show } from './show.js';

/** Element types of storage. Arithmetic and running statistics are f32 or wider whatever the storage. */
export type DType = 'f32' | 'f16' | 'bf16' | 'i32' | 'u32' | 'i16' | 'u16' | 'i8' | 'u8';

/** The element types that hold real numbers. */
export type FloatDType = 'f32' | 'f16' | 'bf16';

/** In the order of the native enumeration. */
export const dtypes: readonly DType[] = ['f32', 'f16', 'bf16', 'i32', 'u32', 'i16', 'u16', 'i8', 'u8'];

const arrays = {
  f32: Float32Array,
  f16: Uint16Array,
  bf16: Uint16Array,
  i32: Int32Array,
  u32: Uint32Array,
  i16: Int16Array,
  u16: Uint16Array,
  i8: Int8Array,
  u8: Uint8Array,
} as const;

export const typedArrayPrototype = Object.getPrototypeOf(Uint8Array.prototype) as object;

/** What tells true arrays from objects that only look like them. */
const isArrayOf = {
  f32: types.isFloat32Array,
  f16: types.isUint16Array,
  bf16: types.isUint16Array,
  i32: types.isInt32Array,
  u32: types.isUint32Array,
  i16: types.isInt16Array,
  u16: types.isUint16Array,
  i8: types.isInt8Array,
  u8: types.isUint8Array,
} as const satisfies Record<DType, (value: unknown) => boolean>;

interface ElementArrays {
  f32: Float32Array;
  f16: Uint16Array;
  bf16: Uint16Array;
  i32: Int32Array;
  u32: Uint32Array;
  i16: Int16Array;
  u16: Uint16Array;
  i8: Int8Array;
  u8: Uint8Array;
}

/** The JavaScript array of a dtype's elements; `f16` and `bf16` are their raw 16 bits. */
export type ElementArray<D extends DType = DType> = ElementArrays[D];

/** @throws DTypeError when it is none */
export function byteSize(dtype: DType): number {
  if (dtypes.includes(dtype)) return arrays[dtype].BYTES_PER_ELEMENT;
  throw new DTypeError(`${show(dtype)} is not a dtype; use one of ${dtypes.join(', ')}.`, {
    subject: 'dtype',
    given: dtype,
    wanted: dtypes,
  });
}

export function createElementArray<D extends DType>(dtype: D, length: number): ElementArray<D> {
  return new arrays[dtype](length) as ElementArray<D>;
}

/**
 * Refuses what is not an array of `wanted` elements of the dtype. An array whose buffer was transferred has none.
 * @throws DTypeError, ShapeError
 */
export function expectElements(subject: string, dtype: DType, wanted: number, given: unknown): void {
  if (!isArrayOf[dtype](given)) {
    throw new DTypeError(`${subject}: ${dtype} elements come in a ${arrays[dtype].name}; ${show(given)} was given.`, {
      subject,
      given,
      wanted: arrays[dtype].name,
    });
  }
  // A subclass may say another length than its memory has.
  const length = Reflect.get(typedArrayPrototype, 'length', given) as number;
  if (length !== wanted) {
    throw new ShapeError(`${subject}: ${length} elements were given for a tensor that has ${wanted}; give as many.`, {
      subject,
      given: length,
      wanted,
    });
  }
}
