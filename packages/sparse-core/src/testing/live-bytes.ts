import { setTimeout } from 'node:timers/promises';
import type { Device } from '../handles.js';

/** The bytes that a device holds once disposed streams, which close in the background, have let go of theirs. */
export async function liveBytes(device: Device, wanted: number): Promise<number> {
  const end = Date.now() + 10_000;
  while (device.memory().live !== wanted && Date.now() < end) await setTimeout(5);
  return device.memory().live;
}
