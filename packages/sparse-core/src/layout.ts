import { type DType, dtypes } from './dtype.js';
import { DTypeError, ShapeError } from './errors.js';
import { show } from './show.js';

/** Names of a tensor's axes, outermost first. */
export type Axes = readonly string[];

/** One extent (or stride) for each axis. */
export type Extents<A extends Axes> = { readonly [Index in keyof A]: number };

/** As `kMaxRank` of `native/bindings/tensor-object.h`. */
const maxRank = 6;
/** The rows of a tensor without elements still cost a loop's turn each. */
const mostEmptyRows = 2 ** 31 - 1;

/** What a contiguous tensor is like. The arrays are copies of what was given, and frozen. */
export interface Layout<A extends Axes> {
  readonly axes: A;
  readonly shape: Extents<A>;
  readonly strides: Extents<A>;
  readonly elements: number;
}

/**
 * The one check of a shape that a caller gives.
 * @throws DTypeError, ShapeError
 */
export function checkedLayout<A extends Axes>(subject: string, dtype: DType, axes: A, shape: Extents<A>): Layout<A> {
  if (!dtypes.includes(dtype)) {
    throw new DTypeError(`${subject}: ${show(dtype)} is not a dtype; use one of ${dtypes.join(', ')}.`, {
      subject,
      given: dtype,
      wanted: dtypes,
    });
  }
  const [names, extents] = [copied(axes), copied(shape)];
  if (
    names?.every((name) => typeof name === 'string') !== true ||
    extents?.every((extent) => Number.isSafeInteger(extent) && (extent as number) >= 0) !== true ||
    names.length !== extents.length
  ) {
    throw new ShapeError(
      `${subject}: axes ${show(axes)} and shape ${show(shape)} were given; give one name and one non-negative ` +
        `whole number for each axis, and at most ${maxRank} axes.`,
      { subject, given: shape, wanted: axes },
    );
  }
  if (new Set(names).size < names.length) {
    throw new ShapeError(`${subject}: the axes [${names.join(', ')}] were given; no two may have one name.`, {
      subject,
      given: axes,
    });
  }
  const sizes = extents as number[];
  const elements = elementCount(sizes);
  const rows = elementCount(sizes.map((extent) => Math.max(1, extent)));
  if (elements === 0 && rows > mostEmptyRows) {
    throw new ShapeError(`${subject}: the shape [${sizes.join(', ')}] has no elements, in too many rows; give a smaller one.`, {
      subject,
      given: shape,
    });
  }
  return Object.freeze({
    axes: Object.freeze(names) as unknown as A,
    shape: Object.freeze(sizes) as unknown as Extents<A>,
    strides: Object.freeze(rowMajorStrides(sizes)) as unknown as Extents<A>,
    elements,
  });
}

/** The elements of an array as they are now; undefined when it is none, or has too many. */
function copied(given: unknown): unknown[] | undefined {
  if (!Array.isArray(given)) return undefined;
  const { length } = given;
  if (!(length <= maxRank)) return undefined;
  return Array.from({ length }, (_, index): unknown => given[index]);
}

export function elementCount(shape: readonly number[]): number {
  return shape.reduce((count, extent) => count * extent, 1);
}

export function rowMajorStrides(shape: readonly number[]): number[] {
  const strides = new Array<number>(shape.length);
  let stride = 1;
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    strides[axis] = stride;
    stride *= shape[axis] ?? 1;
  }
  return strides;
}

/** Elements from the first to the last, what lies between them included. */
export function spanOf(shape: readonly number[], strides: readonly number[]): number {
  let last = 0;
  for (let axis = 0; axis < shape.length; axis++) last += ((shape[axis] ?? 0) - 1) * (strides[axis] ?? 0);
  return last + 1;
}

/** Whether the elements lie in row-major order without gaps. */
export function isContiguous(shape: readonly number[], strides: readonly number[]): boolean {
  let stride = 1;
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    const extent = shape[axis] ?? 0;
    if (extent > 1 && strides[axis] !== stride) return false;
    stride *= extent;
  }
  return true;
}
