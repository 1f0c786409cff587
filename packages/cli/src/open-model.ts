import { Model } from '@kv/model';
import { createDevice } from '@kv/sparse-core';
import type { DeviceKind } from '@kv/sparse-core';

import type { DeviceChoice } from './options.js';

/**
 * Opens a model on the device that the options name.
 * @throws ModelFormatError, CapabilityError, DeviceError
 */
export function openModel(directory: string, { device, threads }: DeviceChoice): Promise<Model> {
  const kind = device as DeviceKind;
  return Model.open(directory, { device: createDevice({ kind, threads }) });
}
