import { safetensorsFile, type TensorToWrite } from '@kv/sparse-core/testing';
import { parseModelConfig } from '../config/read-model-config.js';
import type { ModelConfig } from '../config/model-config.js';
import { layerShapes, outerShapes } from '../weights/weight-shapes.js';

/** A model of random weights: its config, its weights by name, and its directory's files. */
export interface RandomModel {
  readonly config: ModelConfig;
  readonly weights: ReadonlyMap<string, Float32Array>;
  readonly files: Readonly<Record<string, Uint8Array | string>>;
}

/** Numbers from -1 to 1, the same for the same seed (mulberry32). */
export function randomNumbers(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 31 - 1;
  };
}

/**
 * @param json a config.json
 * @param shards how many files hold the weights
 */
export function randomModel(json: object, shards = 1, seed = 1): RandomModel {
  const config = parseModelConfig('config.json', json);
  const layers = Array.from({ length: config.layers }, (_, layer) => layerShapes(config, layer));
  const shapes = Object.entries(
    Object.assign({}, outerShapes(config), ...layers) as ReturnType<typeof outerShapes>,
  );
  const random = randomNumbers(seed);
  const weights = new Map(shapes.map(([name, shape]) => [name, randomWeight(name, shape, random)]));
  const tensors = shapes.map(([name, shape]): [string, TensorToWrite] => [
    name,
    { dtype: 'F32', shape, bytes: new Uint8Array(weights.get(name)?.buffer ?? new ArrayBuffer()) },
  ]);
  return { config, weights, files: { 'config.json': JSON.stringify(json), ...weightFiles(tensors, shards) } };
}

/** Norms about one, matrices small enough that the activations neither vanish nor grow. */
function randomWeight(name: string, shape: readonly number[], random: () => number): Float32Array {
  const isNorm = name.includes('norm');
  const scale = isNorm ? 0.5 : shape.length === 1 ? 0.5 : Math.sqrt(3 / (shape[1] ?? 1));
  const count = shape.reduce((product, extent) => product * extent, 1);
  return Float32Array.from({ length: count }, () => (isNorm ? 1 : 0) + scale * random());
}

function weightFiles(
  tensors: [string, TensorToWrite][],
  shards: number,
): Record<string, Uint8Array | string> {
  if (shards === 1) return { 'model.safetensors': safetensorsFile(Object.fromEntries(tensors)) };
  const files: Record<string, Uint8Array | string> = {};
  const map: Record<string, string> = {};
  for (let shard = 0; shard < shards; shard += 1) {
    const [number, count] = [shard + 1, shards].map((each) => String(each).padStart(5, '0'));
    const name = `model-${number}-of-${count}.safetensors`;
    const own = tensors.filter((_, index) => index % shards === shard);
    for (const [tensor] of own) map[tensor] = name;
    files[name] = safetensorsFile(Object.fromEntries(own));
  }
  return { ...files, 'model.safetensors.index.json': JSON.stringify({ weight_map: map }) };
}
