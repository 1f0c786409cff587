import type { Device } from '@kv/sparse-core';

import type { ModelConfig } from '../config/model-config.js';
import type { ModelWeights } from '../weights/model-weights.js';

/** What a runner needs of its model. */
export interface RunnerModel {
  readonly device: Device;
  readonly config: ModelConfig;
  readonly weights: ModelWeights;
}
