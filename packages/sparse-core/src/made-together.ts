/** Makes several things: those made so far are disposed when one of them cannot be made. */
export function madeTogether<Result>(
  make: (own: <Kind extends Disposable>(made: Kind) => Kind) => Result,
): Result {
  const owned: Disposable[] = [];
  try {
    return make((made) => {
      owned.push(made);
      return made;
    });
  } catch (error) {
    for (const each of owned) each[Symbol.dispose]();
    throw error;
  }
}
