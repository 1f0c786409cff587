import { byteSize, type DType } from './dtype.js';

/** Where a tensor lies, from its first byte to behind its last. */
interface Placed {
  readonly dtype: DType;
  readonly shape: readonly number[];
  readonly strides: readonly number[];
  readonly byteLength: number;
  readonly firstByte: number;
  readonly endByte: number;
}

/** Bytes of what lies between neighbours of a tensor's outermost axis that has any, and of one of them. */
function rowsOf(tensor: Placed): { stride: number; width: number } {
  const { shape, strides, dtype } = tensor;
  const axis = shape.findIndex((extent) => extent > 1);
  const bytes = tensor.endByte - tensor.firstByte;
  if (axis === -1) return { stride: 0, width: bytes };
  const stride = (strides[axis] ?? 0) * byteSize(dtype);
  const width = bytes - ((shape[axis] ?? 0) - 1) * stride;
  return stride === width ? { stride: 0, width: bytes } : { stride, width };
}

/**
 * Whether two tensors share memory. Columns of one matrix do not, though they lie between one another; tensors of
 * different strides that lie so are taken to.
 */
export function overlap(one: Placed, other: Placed): boolean {
  if (one.endByte <= other.firstByte || other.endByte <= one.firstByte) return false;
  if (one.byteLength === 0 || other.byteLength === 0) return false;
  const [a, b] = [rowsOf(one), rowsOf(other)];
  const stride = Math.max(a.stride, b.stride);
  // A tensor without gaps is a single row.
  if (stride === 0 || (a.stride !== 0 && b.stride !== 0 && a.stride !== b.stride)) return true;
  const distance = other.firstByte - one.firstByte;
  const column = ((distance % stride) + stride) % stride;
  return column < a.width || column + b.width > stride;
}

/** Whether two tensors are the same elements in the same order. */
export function coincide(one: Placed, other: Placed): boolean {
  return (
    one.firstByte === other.firstByte &&
    one.dtype === other.dtype &&
    one.shape.length === other.shape.length &&
    one.shape.every(
      (extent, axis) => extent === other.shape[axis] && (extent <= 1 || one.strides[axis] === other.strides[axis]),
    )
  );
}

/** Whether two tensors of the same strides begin one or more whole blocks, of their first axis, apart. */
export function areBlocksApart(one: Placed, other: Placed): boolean {
  const distance = other.firstByte - one.firstByte;
  return distance !== 0 && distance % ((one.strides[0] ?? 0) * byteSize(one.dtype)) === 0;
}
