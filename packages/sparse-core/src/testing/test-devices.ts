import { createDevice, type Device } from '../device.js';
import type { InstructionSet } from '../addon.js';
import { loadAddon } from '../load-addon.js';

const sets: readonly InstructionSet[] = ['baseline', 'avx2', 'avx512'];

/** Every device of this machine, the CPU once for each instruction set it runs, opened on demand. */
export function testDevices(): { name: string; open: (threads?: number) => Device }[] {
  const widest = sets.indexOf(loadAddon().instructionSet);
  return sets.slice(0, widest + 1).map((instructionSet) => ({
    name: `cpu ${instructionSet}`,
    open: (threads = 2) => createDevice({ threads, instructionSet }),
  }));
}
