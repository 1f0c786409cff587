import { stat } from 'node:fs/promises';
import { join } from 'node:path';

import { loadCodebooks } from '@kv/hcattn-quant';
import { Model } from '@kv/model';
import { describe, expect, it } from 'vitest';

import { passKeyDocument } from '../testing/pass-key-document.js';
import { needleModel, runKv, temporaryFile } from '../testing/run-kv.js';

it.each([
  [32, 8192],
  [16, 8192],
  [8, 4096],
])('the small model comes with codebooks of %i groups', async (groups, centroids) => {
  using model = await Model.open(needleModel);
  const codebooks = await loadCodebooks(join(needleModel, `codebooks-${groups}.safetensors`), { model: await model.fingerprint() });
  expect(codebooks).toMatchObject({ headDim: 64, groups, books: 1, centroids });
  expect(codebooks.layers.map(({ kvHeads }) => kvHeads)).toEqual(new Array(8).fill(2));
});

describe('kv calibrate', () => {
  const text = passKeyDocument();
  const small = ['--groups', '32', '--centroids', '64', '--iterations', '10'];

  it('writes codebooks of the model and says what they are', async () => {
    const [one, other, out] = [await temporaryFile('one.txt', text), await temporaryFile('other.txt', text.slice(0, 900)), await temporaryFile('books', '')];
    const { exitCode, stdout, stderr } = await runKv('calibrate', needleModel, '--text', one, other, '--out', out, ...small, '--channel-scale');
    expect({ exitCode, stderr }).toMatchObject({ exitCode: 0 });
    expect(stdout).toMatch(/: 8 layers, 32 groups of 2 dims, 64 centroids, trained on [\d,]+ tokens: [\d,]+ vectors for each centroid; \d/);
    expect(stderr).toMatch(/reads: .* tokens \(100%\)/);
    expect(stderr).toMatch(/trains: 80\/80 iterations \(100%\)/);
    using model = await Model.open(needleModel);
    const codebooks = await loadCodebooks(out, { model: await model.fingerprint() });
    expect(codebooks).toMatchObject({ headDim: 64, groups: 32, books: 1, centroids: 64, training: { iterations: 10, batchVectors: 10_000 } });
    expect(codebooks.layers.map(({ kvHeads }) => kvHeads)).toEqual(new Array(8).fill(2));
    expect(codebooks.layers[0]?.scale.some((scale) => scale !== 1)).toBe(true);
  });

  it('refuses texts of too few tokens, and counts them', async () => {
    const [given, out] = [await temporaryFile('text.txt', 'def read_lines(path):\n'), await temporaryFile('books', '')];
    const { exitCode, stderr } = await runKv('calibrate', needleModel, '--text', given, '--out', out);
    expect(exitCode).toBe(1);
    expect(stderr).toMatch(/\d+ keys of a head give \d+ vectors for a codebook of 8192 centroids, 0\.\d for each; 39 are wanted\. Give texts of 9984 tokens/);
    expect(stderr).not.toContain('reads');
    expect((await stat(out)).size).toBe(0);
  });

  it.each([
    [['--groups', '7'], /kv: --groups is 7; it must be a divisor of the 64 dims/],
    [['--centroids', '8193'], /kv: --centroids is 8193/],
    [['--out', '/nowhere/books'], /\/nowhere\/books cannot be written/],
    [['--out', ''], /--out: an empty path cannot be written/],
    [['--out', '/tmp'], /--out: \/tmp cannot be written: it is a folder/],
    [['--text', '/nowhere/text'], /text \/nowhere\/text cannot be read/],
  ])('refuses %j', async (changed, message) => {
    const given = await temporaryFile('text.txt', text);
    const args = ['--text', given, '--out', join(given, '..', 'books'), ...small, ...changed];
    const { exitCode, stderr } = await runKv('calibrate', needleModel, ...args);
    expect(exitCode).toBe(1);
    expect(stderr).toMatch(message);
    expect(stderr).not.toContain('reads');
  });
});
