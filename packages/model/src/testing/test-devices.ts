import { devices } from '@kv/sparse-core';
import type { DeviceKind } from '@kv/sparse-core';
import { describe } from 'vitest';

/** The same tests on every kind of device. Those of one that this machine lacks are reported as skipped. */
export function describeOnEachKind(subject: string, tests: (kind: DeviceKind) => void): void {
  for (const kind of ['cpu', 'cuda'] as const) {
    describe.skipIf(!devices().includes(kind))(`${subject} on ${kind}`, () => {
      tests(kind);
    });
  }
}
