const word = (1n << 32n) - 1n;

/** Philox4x32-10 (Salmon et al. 2011) in big integers, for oracles. */
export function philox(counter: readonly bigint[], key: readonly bigint[]): bigint[] {
  let [c0, c1, c2, c3] = counter as [bigint, bigint, bigint, bigint];
  let [k0, k1] = key as [bigint, bigint];
  for (let round = 0; round < 10; round++) {
    const [first, second] = [0xd2511f53n * c0, 0xcd9e8d57n * c2];
    [c0, c1, c2, c3] = [(second >> 32n) ^ c1 ^ k0, second & word, (first >> 32n) ^ c3 ^ k1, first & word];
    [k0, k1] = [(k0 + 0x9e3779b9n) & word, (k1 + 0xbb67ae85n) & word];
  }
  return [c0, c1, c2, c3];
}

/** The draw of a seed's step, in [0, 1). */
export function uniform(seed: number, step: number): number {
  const words = (x: number): [bigint, bigint] => [BigInt(x) & word, BigInt(x) >> 32n];
  const [first = 0n, second = 0n] = philox([...words(step), 0n, 0n], words(seed));
  return Number(((first >> 5n) << 26n) + (second >> 6n)) / 2 ** 53;
}
