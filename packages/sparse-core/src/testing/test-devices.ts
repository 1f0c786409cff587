import { describe } from 'vitest';
import { createDevice, devices } from '../device.js';
import type { InstructionSet } from '../native-handles.js';
import type { Device } from '../handles.js';
import { loadAddon } from '../load-addon.js';

export interface TestDevice {
  readonly name: string;
  readonly open: (threads?: number) => Device;
}

const sets: readonly InstructionSet[] = ['baseline', 'avx2', 'avx512', 'amx'];

/** Those that this machine runs, narrowest first. */
function runningSets(): readonly InstructionSet[] {
  return sets.slice(0, sets.indexOf(loadAddon().instructionSet) + 1);
}

/** Every device of this machine, the CPU once for each instruction set it runs, opened on demand. */
function presentDevices(): TestDevice[] {
  const cpus = runningSets().map((instructionSet) => ({
    name: `cpu ${instructionSet}`,
    open: (threads = 2) => createDevice({ threads, instructionSet }),
  }));
  const cuda = { name: 'cuda', open: (threads = 2) => createDevice({ kind: 'cuda', threads }) };
  return devices().includes('cuda') ? [...cpus, cuda] : cpus;
}

/** The same tests on every device. Without a GPU those of CUDA are reported as skipped. */
export function describeOnDevices(subject: string, tests: (device: TestDevice) => void): void {
  describeOn(presentDevices(), subject, tests);
}

/**
 * The same tests on every device, but on the CPU with its widest instruction set alone: for what is not in a kernel,
 * such as which blocks a store hands out, and therefore the same on every set.
 */
export function describeOnDeviceKinds(subject: string, tests: (device: TestDevice) => void): void {
  const widest = `cpu ${loadAddon().instructionSet}`;
  describeOn(presentDevices().filter(({ name }) => name === widest || name === 'cuda'), subject, tests);
}

function describeOn(present: readonly TestDevice[], subject: string, tests: (device: TestDevice) => void): void {
  for (const device of present) {
    describe(`${subject} on ${device.name}`, () => {
      tests(device);
    });
  }
  if (!devices().includes('cuda')) {
    // Collected to be counted, never run: any device serves.
    describe.skip(`${subject} on cuda`, () => {
      tests({ name: 'cuda', open: (threads = 1) => createDevice({ threads }) });
    });
  }
}
