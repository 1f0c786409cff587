/**
 * The strides of the same elements, in the same order, under another shape with as many; undefined where they would
 * have to move. Axes may be split and joined as long as the joined ones' elements follow each other evenly.
 */
export function viewStrides(
  shape: readonly number[],
  strides: readonly number[],
  wanted: readonly number[],
): number[] | undefined {
  const result = new Array<number>(wanted.length).fill(1);
  if (shape.includes(0)) return result;
  let next = wanted.length - 1;
  let axis = shape.length - 1;
  while (axis >= 0) {
    // A run: as many axes as are evenly spaced together.
    const step = strides[axis] ?? 1;
    let elements = 1;
    do {
      elements *= shape[axis] ?? 1;
      axis -= 1;
    } while (axis >= 0 && (shape[axis] === 1 || strides[axis] === elements * step));
    let taken = 1;
    while (next >= 0 && taken * (wanted[next] ?? 1) <= elements) {
      result[next] = taken * step;
      taken *= wanted[next] ?? 1;
      next -= 1;
    }
    if (taken !== elements) return undefined;
  }
  return result;
}
