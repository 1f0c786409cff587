/** One list of what several lists name. */
export function joinedIds(...lists: readonly Int32Array[]): Int32Array {
  const all = new Int32Array(lists.reduce((length, list) => length + list.length, 0));
  let end = 0;
  for (const list of lists) {
    all.set(list, end);
    end += list.length;
  }
  return all;
}
