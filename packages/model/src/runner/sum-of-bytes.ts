import type { KvBytes } from '@kv/sparse-core';

export function sumOfBytes(all: readonly KvBytes[]): KvBytes {
  // Parts of a shared pool need not be whole.
  const sum = (where: keyof KvBytes): number => Math.round(all.reduce((total, bytes) => total + bytes[where], 0));
  return { device: sum('device'), host: sum('host') };
}
