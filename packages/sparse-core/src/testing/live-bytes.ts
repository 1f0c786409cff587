import type { Device } from '../handles.js';
import { eventually } from './eventually.js';

/** The bytes that a device holds once disposed streams, which close in the background, have let go of theirs. */
export async function liveBytes(device: Device, wanted: number): Promise<number> {
  await eventually(() => device.memory().live === wanted);
  return device.memory().live;
}
