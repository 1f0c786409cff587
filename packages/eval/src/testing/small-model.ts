import { fileURLToPath } from 'node:url';

import { Model } from '@kv/model';
import type { Runner, RunnerOptions } from '@kv/model';
import { createDevice } from '@kv/sparse-core';

/** A file of the repository's small model. */
export function smallModelFile(name: string): string {
  return fileURLToPath(new URL(`../../../../models/needle-8m/${name}`, import.meta.url));
}

/** Opens the small model and a runner of it, gives them to `use`, and disposes them. */
export async function withSmallModel<Result>(
  options: RunnerOptions,
  use: (runner: Runner, model: Model) => Promise<Result>,
): Promise<Result> {
  using model = await Model.open(smallModelFile(''), { device: createDevice({ threads: 2 }) });
  using runner = model.createRunner(options);
  return await use(runner, model);
}
