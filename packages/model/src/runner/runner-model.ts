import type { Device } from '@kv/sparse-core';
import { expectObject, expectThat, isDevice } from '@kv/sparse-core/native';

import type { ModelConfig } from '../config/model-config.js';
import { ModelWeights } from '../weights/model-weights.js';

/** What a runner needs of its model. */
export interface RunnerModel {
  readonly device: Device;
  readonly config: ModelConfig;
  readonly weights: ModelWeights;
}

/** @throws InvalidValueError unless it is one that was opened; DisposedError */
export function expectModel(given: RunnerModel): void {
  expectObject('createRunner', 'model', given);
  const isOpen = isDevice(given.device) && given.weights instanceof ModelWeights;
  expectThat('createRunner', 'model', given, isOpen, 'a model of Model.open()');
  given.weights.assertHeld();
}
