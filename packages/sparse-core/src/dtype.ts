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

export function byteSize(dtype: DType): number {
  return arrays[dtype].BYTES_PER_ELEMENT;
}

export function createElementArray<D extends DType>(dtype: D, length: number): ElementArray<D> {
  return new arrays[dtype](length) as ElementArray<D>;
}

export function isElementArray<D extends DType>(dtype: D, value: unknown): value is ElementArray<D> {
  return value instanceof arrays[dtype];
}

export function elementArrayName(dtype: DType): string {
  return arrays[dtype].name;
}
