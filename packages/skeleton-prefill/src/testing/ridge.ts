/** A square matrix, row after row. */
export type Matrix = readonly Float64Array[];

export function squareMatrix(size: number): Float64Array[] {
  return Array.from({ length: size }, () => new Float64Array(size));
}

/**
 * `x` of `(gram + ridge² trace(gram) / 4) x = right`: Algorithm 1, line 13, where `gram` is AᵀA, `right` is Aᵀb and the
 * trace is ‖A‖². Of a matrix that is not positive definite NaN.
 */
export function solveRidge(gram: Matrix, right: ArrayLike<number>, ridge: number): Float64Array {
  const size = gram.length;
  const trace = gram.reduce((sum, row, index) => sum + (row[index] ?? NaN), 0);
  const factor = squareMatrix(size);
  const at = (row: number, column: number) => factor[row]?.[column] ?? NaN;
  const solution = new Float64Array(size);
  const known = (index: number) => solution[index] ?? NaN;
  for (let row = 0; row < size; row++) {
    for (let column = 0; column <= row; column++) {
      let rest = (gram[row]?.[column] ?? NaN) + (row === column ? (ridge ** 2 * trace) / 4 : 0);
      for (let k = 0; k < column; k++) rest -= at(row, k) * at(column, k);
      const to = factor[row];
      if (to) to[column] = row === column ? Math.sqrt(rest) : rest / at(column, column);
    }
    let rest = right[row] ?? NaN;
    for (let k = 0; k < row; k++) rest -= at(row, k) * known(k);
    solution[row] = rest / at(row, row);
  }
  for (let row = size - 1; row >= 0; row--) {
    let rest = known(row);
    for (let k = row + 1; k < size; k++) rest -= at(k, row) * known(k);
    solution[row] = rest / at(row, row);
  }
  return solution;
}
