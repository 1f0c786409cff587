import { readdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';

import { InvalidValueError, KvError, ModelFormatError, ShapeError } from '@kv/sparse-core';
import { readSafetensorsHeader, writeSafetensors } from '@kv/sparse-core/native';
import { Random, rawFile, withDirectory } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';
import { randomCodebooks, someFingerprint } from '../testing/random-codebooks.js';
import { codeBitsOf, type Codebooks, expectCodebooksOf } from './codebooks.js';
import { loadCodebooks, saveCodebooks } from './codebooks-file.js';

const sizes = { layers: 2, kvHeads: 3, headDim: 8, groups: 4, centroids: 5 };
const layersOf = ({ layers, kvHeads, headDim }: typeof sizes) =>
  Array.from({ length: layers }, (_, index) => ({ index, queryHeads: kvHeads, kvHeads, headDim }));

const inFile = <Result>(use: (file: string, directory: string) => Promise<Result>) =>
  withDirectory({}, (directory) => use(join(directory, 'books.safetensors'), directory));

describe('a file of codebooks', () => {
  it.each([{}, { separate: true }, { scaled: true }, { groups: 8, centroids: 2 }])('gives back what was written: %j', async (choices) => {
    const codebooks = randomCodebooks(new Random(1), { ...sizes, ...choices });
    await inFile(async (file, directory) => {
      await saveCodebooks(file, codebooks);
      expect(await loadCodebooks(file, { model: someFingerprint })).toEqual(codebooks);
      expect(await readdir(directory)).toEqual(['books.safetensors']);
      const { tensors } = await readSafetensorsHeader(file);
      expect(tensors.get('layers.1.centroids')?.shape).toEqual([3, codebooks.books, codebooks.centroids, 8 / codebooks.groups]);
    });
  });

  it('may be of layers with unequal heads', async () => {
    const [wide, narrow] = [3, 1].map((kvHeads) => randomCodebooks(new Random(2), { ...sizes, kvHeads, layers: 1 }));
    const codebooks = { ...wide, layers: [...(wide?.layers ?? []), ...(narrow?.layers ?? [])] } as Codebooks;
    await inFile(async (file) => {
      await saveCodebooks(file, codebooks);
      expect((await loadCodebooks(file)).layers.map(({ kvHeads }) => kvHeads)).toEqual([3, 1]);
    });
  });

  it('is refused when it is of another model, and says both', async () => {
    await inFile(async (file) => {
      await saveCodebooks(file, randomCodebooks(new Random(3), sizes));
      const other = 'f'.repeat(64);
      await expect(loadCodebooks(file, { model: other })).rejects.toMatchObject({
        code: 'KV_MODEL_FORMAT',
        given: someFingerprint,
        wanted: other,
      });
    });
  });

  const centroids = { dtype: 'F16', shape: [1, 1, 2, 4], elements: new Uint16Array(8) } as const;
  const scale = { dtype: 'F32', shape: [1, 8], elements: new Float32Array(8).fill(1) } as const;
  const good = { 'layers.0.centroids': centroids, 'layers.0.scale': scale };
  const counts = { seed: '1', iterations: '200', batchVectors: '10000', keys: '100' };
  const metadata = { format: 'kv-codebooks-1', model: someFingerprint, groups: '2', ...counts };
  const notFinite = Uint16Array.of(0, 0, 0, 0x7e00, 0, 0, 0, 0);
  const cases: [string, object, object, RegExp][] = [
    ['of another format', good, { ...metadata, format: 'pt' }, /given pt/],
    ['without metadata', good, {}, /given nothing/],
    ['of no model', good, { ...metadata, model: 'needle' }, /fingerprint/],
    ['whose groups do not divide the head', good, { ...metadata, groups: '3' }, /divisor of the 8 dims/],
    ['whose groups are no number', good, { ...metadata, groups: '-2' }, /groups/],
    ['whose seed is no number', good, { ...metadata, seed: 'x' }, /seed/],
    ['without tensors', {}, metadata, /two for each layer/],
    ['without a scale', { 'layers.0.centroids': centroids, 'layers.1.scale': scale }, metadata, /layers\.0\.scale: given nothing/],
    ['of centroids of another dtype', { ...good, 'layers.0.centroids': { ...centroids, dtype: 'BF16' } }, metadata, /given BF16/],
    ['of centroids of three axes', { ...good, 'layers.0.centroids': { ...centroids, shape: [1, 2, 4] } }, metadata, /4 axes/],
    ['with a NaN', { ...good, 'layers.0.centroids': { ...centroids, elements: notFinite } }, metadata, /number 3 of .*centroids/],
    ['with a scale of 0', { ...good, 'layers.0.scale': { ...scale, elements: new Float32Array(8) } }, metadata, /number 0 of .*scale/],
    ['of one centroid', { ...good, 'layers.0.centroids': { ...centroids, shape: [2, 1, 1, 4] } }, metadata, /centroids is 1/],
    ['of three books for two groups', { ...good, 'layers.0.centroids': { dtype: 'F16', shape: [1, 3, 2, 4], elements: new Uint16Array(24) } }, metadata, /1 or 2/],
  ];
  it.each(cases)('is refused when it is one %s', async (_name, tensors, texts, message) => {
    await inFile(async (file) => {
      await writeSafetensors(file, tensors as never, texts as never);
      const error: unknown = await loadCodebooks(file).catch((reason: unknown) => reason);
      expect(error).toBeInstanceOf(ModelFormatError);
      expect(String(error)).toMatch(message);
      expect(String(error)).toContain(file);
    });
  });

  it('is refused when it is cut, or no file', async () => {
    await inFile(async (file, directory) => {
      await expect(loadCodebooks(file)).rejects.toThrow(ModelFormatError);
      await expect(loadCodebooks(directory)).rejects.toThrow(ModelFormatError);
      await expect(loadCodebooks(undefined as never)).rejects.toThrow(ModelFormatError);
      await expect(loadCodebooks(file, null as never)).rejects.toThrow(InvalidValueError);
      await writeFile(file, rawFile('{}').subarray(0, 9));
      await expect(loadCodebooks(file)).rejects.toThrow(ModelFormatError);
    });
  });

  it('that cannot be written is said, and what was there stays', async () => {
    const codebooks = randomCodebooks(new Random(4), sizes);
    await inFile(async (file, directory) => {
      await expect(saveCodebooks(join(directory, 'no', 'such'), codebooks)).rejects.toThrow(InvalidValueError);
      await expect(saveCodebooks(directory, codebooks)).rejects.toThrow(InvalidValueError);
      await saveCodebooks(file, codebooks);
      await expect(saveCodebooks(file, { ...codebooks, groups: 3 })).rejects.toThrow(InvalidValueError);
      expect(await loadCodebooks(file)).toEqual(codebooks);
    });
  });
});

describe('codebooks', () => {
  const codebooks = randomCodebooks(new Random(5), sizes);

  it('are accepted for the layers that they are of', () => {
    expectCodebooksOf('test', codebooks, layersOf(sizes));
  });

  it.each([{ layers: 3 }, { kvHeads: 2 }, { headDim: 16 }])('are refused for layers of %j', (other) => {
    const check = () => {
      expectCodebooksOf('test', codebooks, layersOf({ ...sizes, ...other }));
    };
    expect(check).toThrow(ShapeError);
    expect(check).toThrow(/the codebooks have .*, and the model has/);
  });

  it.each([
    { groups: 0 }, { groups: 3 }, { groups: 2.5 }, { centroids: 1 }, { centroids: 8193 }, { centroids: '5' }, { books: 2 },
    { headDim: 513 }, { model: undefined }, { layers: undefined }, { layers: [null] },
    { layers: [{ ...codebooks.layers[0], kvHeads: 0 }] }, { layers: [{ ...codebooks.layers[0], centroids: [] }] },
    { layers: [{ ...codebooks.layers[0], scale: new Float32Array(24).fill(NaN) }] },
  ])('are refused with %j', (other) => {
    expect(() => {
      expectCodebooksOf('test', { ...codebooks, ...(other as object) }, layersOf(sizes));
    }).toThrow(KvError);
  });

  it.each([[2, 1], [3, 2], [256, 8], [257, 9], [4096, 12], [4097, 13], [8192, 13]])('of %i centroids have codes of %i bits', (count, bits) => {
    expect(codeBitsOf(count)).toBe(bits);
  });
});
