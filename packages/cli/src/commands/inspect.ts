import { readModelConfig, readStoredTensors } from '@kv/model';
import type { ModelConfig, StoredTensor } from '@kv/model';

import type { CommandContext } from '../command-context.js';
import { formatBytes, formatCount, formatFacts } from '../format.js';

/** Bytes of one number of the default cache, which is f16. */
const cacheNumberBytes = 2;

/**
 * `kv inspect`: what a model is, from its config and the headers of its files; no weight is read.
 * @throws ModelFormatError when a file is missing or malformed; CapabilityError for an unknown family
 */
export async function inspect(directory: string, { stdout }: CommandContext): Promise<void> {
  const config = await readModelConfig(directory);
  const tensors = [...(await readStoredTensors(directory)).values()];
  stdout.write(
    formatFacts([...describeConfig(config), ...describeWeights(tensors), ...describeCache(config)]),
  );
}

type Facts = (readonly [string, string])[];

function describeConfig(config: ModelConfig): Facts {
  const { queryHeads, kvHeads, headDim, rope, slidingWindow } = config;
  const scaling =
    rope.scaling.kind === 'none' ? 'no scaling' : `${rope.scaling.kind} scaling × ${rope.scaling.factor}`;
  return [
    ['family', config.family],
    ['layers', String(config.layers)],
    ['hidden', `${config.hiddenSize}, feed-forward ${config.intermediateSize}`],
    ['heads', `${queryHeads} for queries, ${kvHeads} for keys and values, of size ${headDim}`],
    [
      'vocabulary',
      `${formatCount(config.vocabularySize)} tokens, ${config.tiedHead ? 'tied' : 'separate'} head`,
    ],
    ['RoPE', `theta ${formatCount(rope.theta)}, ${scaling}`],
    ['context', `${formatCount(config.maxPositions)} tokens`],
    ...(slidingWindow === null ? [] : ([['window', `${formatCount(slidingWindow)} tokens`]] as const)),
  ];
}

function describeWeights(tensors: readonly StoredTensor[]): Facts {
  const parameters = tensors.reduce(
    (sum, { shape }) => sum + shape.reduce((product, extent) => product * extent, 1),
    0,
  );
  const bytes = tensors.reduce((sum, { byteLength }) => sum + byteLength, 0);
  const dtypes = [...new Set(tensors.map(({ dtype }) => dtype.toLowerCase()))];
  const files = new Set(tensors.map(({ file }) => file)).size;
  return [
    ['parameters', formatCount(parameters)],
    ['weights', `${formatBytes(bytes)} of ${dtypes.join(', ')} in ${tensors.length} tensors, files: ${files}`],
  ];
}

function describeCache({ layers, kvHeads, headDim, maxPositions }: ModelConfig): Facts {
  const bytesPerToken = 2 * layers * kvHeads * headDim * cacheNumberBytes;
  return [
    ['KV cache', `${formatBytes(bytesPerToken)} a token in f16`],
    ['', `${formatBytes(bytesPerToken * maxPositions)} for the whole context`],
  ];
}
