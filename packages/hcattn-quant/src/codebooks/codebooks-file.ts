import { KvError, ModelFormatError } from '@kv/sparse-core';
import { excerpt, expectOptions, openFile, readBytes, readSafetensorsHeader, writeSafetensors } from '@kv/sparse-core/native';
import type { StoredDType, StoredTensor, TensorToStore } from '@kv/sparse-core/native';
import { type Codebooks, type CodebookTraining, expectCodebooks, type LayerCodebooks } from './codebooks.js';

/** Of the metadata: what files of this layout say. */
const format = 'kv-codebooks-1';
const trainingNames = ['seed', 'iterations', 'batchVectors', 'keys'] as const satisfies (keyof CodebookTraining)[];

const nameOf = (layer: number, part: keyof Omit<LayerCodebooks, 'kvHeads'>) => `layers.${layer}.${part}`;

/**
 * Writes codebooks as a safetensors file: for each layer `layers.N.centroids`, F16 `[kvHead, book, centroid, subDim]`, and
 * `layers.N.scale`, F32 `[kvHead, dim]`; metadata: `format`, `model`, `groups`, and how they were trained.
 * @throws InvalidValueError, ShapeError when they are malformed, or the file cannot be written
 */
export async function saveCodebooks(file: string, codebooks: Codebooks): Promise<void> {
  expectCodebooks('saveCodebooks', codebooks);
  const { model, headDim, groups, books, centroids, layers, training } = codebooks;
  const tensors: Record<string, TensorToStore> = {};
  layers.forEach((layer, index) => {
    const shape = [layer.kvHeads, books, centroids, headDim / groups];
    tensors[nameOf(index, 'centroids')] = { dtype: 'F16', shape, elements: layer.centroids };
    tensors[nameOf(index, 'scale')] = { dtype: 'F32', shape: [layer.kvHeads, headDim], elements: layer.scale };
  });
  const settings = trainingNames.map((name) => [name, String(training[name])]);
  const metadata = { format, model, groups: String(groups), ...Object.fromEntries(settings) as Record<string, string> };
  await writeSafetensors(file, tensors, metadata);
}

export interface LoadCodebooksOptions {
  /** `model.fingerprint()` of the model that will use them. Default: any. */
  readonly model?: string | undefined;
}

/**
 * Reads codebooks that `saveCodebooks` wrote, and checks all of them.
 * @throws ModelFormatError when the file is missing or malformed, holds a number that is not finite, or is of another model
 */
export async function loadCodebooks(file: string, options: LoadCodebooksOptions = {}): Promise<Codebooks> {
  expectOptions('loadCodebooks', options, { model: true });
  const { model } = options;
  const { tensors, metadata } = await readSafetensorsHeader(file);
  const textOf = (name: string) => metadata[name] ?? 'nothing';
  if (textOf('format') !== format) fail(file, 'format', textOf('format'), format, 'This is no file of codebooks');
  if (model !== undefined && textOf('model') !== model) {
    fail(file, 'the fingerprint of its model', textOf('model'), model, 'Make codebooks of this model with "kv calibrate"');
  }
  const countOf = (name: string): number => {
    const text = textOf(name);
    return /^\d{1,15}$/.test(text) ? Number(text) : fail(file, name, text, 'a whole number');
  };
  const layers = await readLayers(file, tensors);
  const [, books = NaN, centroids = NaN] = layers[0]?.shape ?? [];
  const [, headDim = NaN] = layers[0]?.scaleShape ?? [];
  const [seed, iterations, batchVectors, keys] = trainingNames.map(countOf) as [number, number, number, number];
  const codebooks: Codebooks = {
    model: textOf('model'),
    headDim,
    groups: countOf('groups'),
    books,
    centroids,
    layers: layers.map(({ shape: [kvHeads = NaN], centroids, scale }) => ({ kvHeads, centroids, scale })),
    training: { seed, iterations, batchVectors, keys },
  };
  try {
    expectCodebooks('loadCodebooks', codebooks);
  } catch (cause) {
    if (!(cause instanceof KvError)) throw cause;
    throw new ModelFormatError(`${file}: ${cause.message}`, { subject: file, given: cause.given, wanted: cause.wanted, cause });
  }
  return codebooks;
}

interface StoredLayer extends Omit<LayerCodebooks, 'kvHeads'> {
  readonly shape: readonly number[];
  readonly scaleShape: readonly number[];
}

/** The tensors of each layer, which are all that the file may hold. */
async function readLayers(file: string, tensors: ReadonlyMap<string, StoredTensor>): Promise<StoredLayer[]> {
  const layers: StoredLayer[] = [];
  if (tensors.size === 0 || tensors.size % 2 !== 0) fail(file, 'tensors', String(tensors.size), 'two for each layer');
  const handle = await openFile(file);
  if (handle === undefined) return fail(file, 'the file', 'nothing', 'a file');
  try {
    for (let layer = 0; layer < tensors.size / 2; layer++) {
      const read = async (part: 'centroids' | 'scale', dtype: StoredDType, axes: number) => {
        const name = nameOf(layer, part);
        const tensor = tensors.get(name);
        if (tensor?.dtype !== dtype || tensor.shape.length !== axes) {
          const given = tensor === undefined ? 'nothing' : `${tensor.dtype} [${tensor.shape.join(', ')}]`;
          return fail(file, name, given, `${dtype} of ${axes} axes`);
        }
        const bytes = await readBytes(handle, tensor.byteOffset, tensor.byteLength);
        return { shape: tensor.shape, buffer: bytes.buffer, length: bytes.byteLength };
      };
      const centroids = await read('centroids', 'F16', 4);
      const scale = await read('scale', 'F32', 2);
      layers.push({
        shape: centroids.shape,
        scaleShape: scale.shape,
        centroids: new Uint16Array(centroids.buffer, 0, centroids.length / 2),
        scale: new Float32Array(scale.buffer, 0, scale.length / 4),
      });
    }
  } finally {
    await handle.close();
  }
  return layers;
}

function fail(file: string, subject: string, given: string, wanted: string, remedy = 'Make the file anew'): never {
  throw new ModelFormatError(`${file}: ${subject}: given ${excerpt(given)}, wanted ${wanted}. ${remedy}.`, { subject, given, wanted });
}
