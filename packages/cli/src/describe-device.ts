import type { Device } from '@kv/sparse-core';

/** A device in a few words: on the CPU, with what decides its speed. */
export function describeDevice({ kind, name, threads, instructionSet }: Device): string {
  return kind === 'cpu' ? `${name}, threads: ${threads}, kernels: ${instructionSet}` : name;
}
