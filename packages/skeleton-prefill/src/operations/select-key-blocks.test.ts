import { InvalidValueError } from '@kv/sparse-core';
import type { Device, TensorHandle } from '@kv/sparse-core';
import { describeOnDevices, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import {
  blockScores,
  listsAbove,
  thresholdOfBudget,
  thresholdOfEpsilon,
} from '../testing/select-blocks-by-definition.js';
import type { BlockOptions, Skeleton } from '../testing/select-blocks-by-definition.js';
import { selectKeyBlocks } from './select-key-blocks.js';
import type { BlockThreshold } from './select-key-blocks.js';

/** Parts of each query head. */
type Heads = readonly Skeleton[];

/** Quarters, whose sums f32 holds exactly: lists are the same to the last block. */
function randomHeads(random: Random, heads: number, tokens: number, rows: number): Heads {
  const quarters = (length: number) => Float32Array.from({ length }, () => Math.round(8 * random.normal()) / 4);
  return Array.from({ length: heads }, () => ({ slash: quarters(tokens), vertical: quarters(tokens), horizontal: quarters(rows) }));
}

function tensorsOf(device: Device, heads: Heads, tileRows: number, spare = 0) {
  const [tokens, rows] = [heads[0]?.slash.length ?? 0, heads[0]?.horizontal.length ?? 0];
  const flat = (part: keyof Skeleton) => Float32Array.from(heads.flatMap((head) => Array.from(head[part])));
  const [tiles, blocks] = [Math.ceil(rows / tileRows), Math.ceil(tokens / 64) + spare];
  const unwritten = new Int32Array(heads.length * tiles * blocks).fill(-1);
  return {
    slash: device.tensor('f32', ['queryHead', 'lag'], [heads.length, tokens], flat('slash')),
    vertical: device.tensor('f32', ['queryHead', 'key'], [heads.length, tokens], flat('vertical')),
    horizontal: device.tensor('f32', ['queryHead', 'row'], [heads.length, rows], flat('horizontal')),
    keyBlocks: device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], [heads.length, tiles, blocks], unwritten),
    keyBlockCounts: device.tensor('i32', ['queryHead', 'queryTile'], [heads.length, tiles]),
  };
}

const defaults: BlockOptions = { sinkTokens: 1, diagonalTokens: 100, tileRows: 128, slashBound: 'safe', denseRows: 0 };

describeOnDevices('selectKeyBlocks', ({ open }) => {
  const run = async (heads: Heads, options: BlockOptions, threshold: BlockThreshold): Promise<number[][][]> => {
    const device = open();
    const stream = device.createStream();
    const tensors = tensorsOf(device, heads, options.tileRows, 2);
    selectKeyBlocks(stream, { ...tensors, ...options, threshold });
    const [counts, blocks] = [await tensors.keyBlockCounts.read(), await tensors.keyBlocks.read()];
    const [, tiles, room] = tensors.keyBlocks.shape;
    return heads.map((_, head) =>
      Array.from({ length: tiles }, (_, tile) => {
        const list = head * tiles + tile;
        const row = Array.from(blocks.subarray(list * room, (list + 1) * room));
        expect(row.slice(counts[list]).every((block) => block === -1)).toBe(true);
        return row.slice(0, counts[list]);
      }),
    );
  };

  it('has the lists of the quadratic builder', async () => {
    const random = new Random(2);
    for (const [tokens, rows] of [[1, 1], [640, 640], [2000, 700], [1999, 65], [4096, 1]] as const) {
      const heads = randomHeads(random, 3, tokens, rows);
      for (const slashBound of ['safe', 'paper'] as const) {
        const options = { ...defaults, slashBound, tileRows: random.pick([64, 128]), denseRows: random.pick([0, 3]) };
        for (const epsilon of [0, 1e-9, 1e4, 1e7]) {
          const wanted = heads.map((head) => listsAbove(blockScores(head, options), Math.fround(thresholdOfEpsilon(epsilon, tokens))));
          expect(await run(heads, options, { epsilon })).toEqual(wanted);
        }
      }
    }
  });

  it('takes the best blocks of a budget, of all heads together', async () => {
    const random = new Random(3);
    for (const budget of [1e-6, 0.03, 0.3, 0.77, 1]) {
      // Every second head looks at fewer places.
      const heads = randomHeads(random, 3, 3000, 1500).map((head, index) => {
        const horizontal = Float32Array.from(head.horizontal, (h) => h - (index % 2));
        return { ...head, horizontal };
      });
      const scores = heads.map((head) => blockScores(head, defaults));
      const threshold = thresholdOfBudget(scores.flat(), budget);
      expect(await run(heads, defaults, { budget })).toEqual(scores.map((of) => listsAbove(of, threshold)));
    }
  });

  it('is within two hundredths of a budget where scores differ', async () => {
    const random = new Random(4);
    const normals = (length: number) => Float32Array.from({ length }, () => random.normal());
    const head = { slash: normals(8192), vertical: normals(8192), horizontal: normals(8192) };
    const options = { ...defaults, diagonalTokens: 1 };
    const all = blockScores(head, options).flat().length;
    for (const budget of [0.1, 0.25]) {
      const taken = (await run([head], options, { budget })).flat(2).length;
      expect(Math.abs(taken / all / budget - 1)).toBeLessThan(0.02);
    }
  });

  it('takes what is NaN, and every block where a part is', async () => {
    const [first, second] = randomHeads(new Random(5), 2, 1024, 1024);
    if (!first || !second) throw new Error('two heads');
    const vertical = Float32Array.from(first.vertical);
    vertical[300] = NaN;
    const heads = [{ ...first, vertical }, { ...second, slash: new Float32Array(1024).fill(NaN) }];
    for (const threshold of [{ epsilon: 1e30 }, { budget: 1e-9 }]) {
      const [some = [], every = []] = await run(heads, defaults, threshold);
      expect(some.map((list) => list.includes(4))).toEqual([false, false, true, true, true, true, true, true]);
      expect(every.map((list) => list.length)).toEqual([2, 4, 6, 8, 10, 12, 14, 16]);
    }
  });

  it('refuses thresholds, options and room that do not fit', () => {
    const device = open();
    const stream = device.createStream();
    const tensors = tensorsOf(device, randomHeads(new Random(6), 2, 300, 200), 128);
    const call = (changes: object) => selectKeyBlocks(stream, { ...tensors, threshold: { budget: 0.5 }, ...changes });
    const thresholds = [{}, { epsilon: 1, budget: 1 }, { epsilon: -1 }, { epsilon: NaN }, { budget: 0 }, { budget: 1.1 }, undefined, 3];
    for (const threshold of thresholds) expect(() => call({ threshold })).toThrow(InvalidValueError);
    for (const wrong of [{ tileRows: 32 }, { denseRows: -1 }, { slashBound: 'mean' }, { sinkTokens: 0.5 }, { diagonalTokens: 0 }]) {
      expect(() => call(wrong)).toThrow(InvalidValueError);
    }
    const lists = (tiles: number, blocks: number): TensorHandle => {
      return device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], [2, tiles, blocks]);
    };
    expect(() => call({ keyBlocks: lists(2, 4) })).toThrow(InvalidValueError);
    expect(() => call({ tileRows: 64 })).toThrow(InvalidValueError);
    expect(() => call({})).not.toThrow();
  });
});
