/** How many different blocks lists of their numbers name: what several slots share counts once. */
export function countDistinct(lists: readonly Int32Array[]): number {
  let most = -1;
  // Iterators, or a set of numbers, would take several times as long for a long text.
  for (const list of lists) {
    const { length } = list;
    for (let index = 0; index < length; index++) most = Math.max(most, list[index] ?? -1);
  }
  const seen = new Uint8Array(most + 1);
  let count = 0;
  for (const list of lists) {
    const { length } = list;
    for (let index = 0; index < length; index++) {
      const id = list[index] ?? 0;
      count += 1 - (seen[id] ?? 1);
      seen[id] = 1;
    }
  }
  return count;
}
