import { DTypeError, InvalidValueError, ShapeError } from '@kv/sparse-core';
import type { Device, TensorHandle } from '@kv/sparse-core';
import { describeOnDevices, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import {
  blockScores,
  blocksSeen,
  listsAbove,
  listsOfBudget,
  listsOfMass,
  listsOfMax,
  listsOfTileBlocks,
  thresholdOfEpsilon,
  withBlocksAlwaysTaken,
} from '../testing/select-blocks-by-definition.js';
import type { BlockOptions, Skeleton } from '../testing/select-blocks-by-definition.js';
import type { BlockThreshold, TileBlocks } from '../block-threshold.js';
import { selectKeyBlocks } from './select-key-blocks.js';
import type { BlockEstimate } from './select-key-blocks.js';

interface Shape {
  readonly tokens: number;
  readonly rows: number;
}

/** Parts of each query head. */
type Heads = readonly Skeleton[];

/** Quarters, whose sums f32 holds exactly: lists are the same to the last block. */
function randomHeads(random: Random, heads: number, tokens: number, rows: number): Heads {
  const quarters = (length: number) => Float32Array.from({ length }, () => Math.round(8 * random.normal()) / 4);
  return Array.from({ length: heads }, () => ({ slash: quarters(tokens), vertical: quarters(tokens), horizontal: quarters(rows) }));
}

/** Room for lists, with some to spare. */
function listsFor(device: Device, heads: number, { tokens, rows }: Shape, tileRows: number) {
  const [tiles, blocks] = [Math.ceil(rows / tileRows), Math.ceil(tokens / 64) + 2];
  const unwritten = new Int32Array(heads * tiles * blocks).fill(-1);
  return {
    keyBlocks: device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], [heads, tiles, blocks], unwritten),
    keyBlockCounts: device.tensor('i32', ['queryHead', 'queryTile'], [heads, tiles]),
  };
}

function partsOf(device: Device, heads: Heads) {
  const { tokens, rows } = shapeOf(heads);
  const flat = (part: keyof Skeleton) => Float32Array.from(heads.flatMap((head) => Array.from(head[part])));
  return {
    slash: device.tensor('f32', ['queryHead', 'lag'], [heads.length, tokens], flat('slash')),
    vertical: device.tensor('f32', ['queryHead', 'key'], [heads.length, tokens], flat('vertical')),
    horizontal: device.tensor('f32', ['queryHead', 'row'], [heads.length, rows], flat('horizontal')),
  };
}

const shapeOf = ([head]: Heads): Shape => ({ tokens: head?.slash.length ?? 0, rows: head?.horizontal.length ?? 0 });

/** `[head][tile][block]` for each tile and the blocks that it sees. */
function scoresOf(device: Device, scores: readonly (readonly (readonly number[])[])[], { tokens, rows }: Shape) {
  const [blocks, tiles] = [Math.ceil(tokens / 64), scores[0]?.length ?? 0];
  const flat = new Float32Array(scores.length * tiles * blocks).fill(1e30);
  scores.flat().forEach((tile, index) => flat.set(tile, index * blocks));
  const tensor = device.tensor('f32', ['queryHead', 'queryTile', 'keyBlock'], [scores.length, tiles, blocks], flat);
  return { scores: tensor, tokens, rows };
}

const defaults: BlockOptions = { sinkTokens: 1, diagonalTokens: 100, tileRows: 128, slashBound: 'safe', denseRows: 0 };

describeOnDevices('selectKeyBlocks', ({ open }) => {
  const listsOf = async (
    estimate: (device: Device) => BlockEstimate,
    heads: number,
    shape: Shape,
    options: BlockOptions & { readonly threshold: BlockThreshold | ((device: Device) => TileBlocks) },
  ): Promise<number[][][]> => {
    const device = open();
    const threshold = typeof options.threshold === 'function' ? options.threshold(device) : options.threshold;
    const stream = device.createStream();
    const lists = listsFor(device, heads, shape, options.tileRows);
    selectKeyBlocks(stream, { ...estimate(device), ...lists, ...options, threshold });
    const [counts, blocks] = [await lists.keyBlockCounts.read(), await lists.keyBlocks.read()];
    const [, tiles, room] = lists.keyBlocks.shape;
    return Array.from({ length: heads }, (_, head) =>
      Array.from({ length: tiles }, (_, tile) => {
        const list = head * tiles + tile;
        const row = Array.from(blocks.subarray(list * room, (list + 1) * room));
        expect(row.slice(counts[list]).every((block) => block === -1)).toBe(true);
        return row.slice(0, counts[list]);
      }),
    );
  };
  const run = (heads: Heads, options: BlockOptions, threshold: BlockThreshold) =>
    listsOf((device) => partsOf(device, heads), heads.length, shapeOf(heads), { ...options, threshold });

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
      expect(await run(heads, defaults, { budget })).toEqual(listsOfBudget(scores, budget));
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

  it('takes blocks by scores: those above a threshold, or the best of all heads, of equal ones the first', async () => {
    const random = new Random(8);
    for (const [tokens, rows] of [[1, 1], [4000, 4000], [3001, 700]] as const) {
      const options = { ...defaults, tileRows: random.pick([64, 128]), denseRows: random.pick([0, 3]) };
      const given = Array.from({ length: 3 }, () =>
        blocksSeen({ tokens, rows }, options.tileRows, () => random.pick([NaN, -Infinity, -0, ...[-6, -5, -4, 0, 1]])),
      );
      const wanted = given.map((tiles) => withBlocksAlwaysTaken(tiles, { tokens, rows }, options));
      const by = (threshold: BlockThreshold) =>
        listsOf((device) => scoresOf(device, given, { tokens, rows }), 3, { tokens, rows }, { ...options, threshold });
      for (const epsilon of [0, 1e-9, 0.5, 1e9]) {
        const threshold = Math.fround(thresholdOfEpsilon(epsilon, tokens));
        expect(await by({ epsilon })).toEqual(wanted.map((tiles) => listsAbove(tiles, threshold)));
      }
      for (const budget of [1e-6, 0.3, 0.5, 0.8, 0.95, 1]) expect(await by({ budget })).toEqual(listsOfBudget(wanted, budget));
    }
  });

  it('takes of each tile the blocks that hold a share of its mass, or that are near its best', async () => {
    const random = new Random(9);
    const [any, few] = [() => Math.fround(3 * random.normal() - 9), () => random.pick([NaN, -Infinity, -0, -9, -6, -5, -4, 1])];
    for (const draw of [any, few, () => 0]) {
      for (const [tokens, rows] of [[1, 1], [4000, 4000], [3001, 700]] as const) {
        const shape = { tokens, rows };
        const options = { ...defaults, tileRows: random.pick([64, 128]), denseRows: random.pick([0, 3]) };
        const given = Array.from({ length: 2 }, () => blocksSeen(shape, options.tileRows, draw));
        const scores = given.map((tiles) => withBlocksAlwaysTaken(tiles, shape, options));
        const by = (threshold: BlockThreshold) =>
          listsOf((device) => scoresOf(device, given, shape), 2, shape, { ...options, threshold });
        for (const mass of [1e-6, 0.5, 0.9, 0.999]) {
          expect(await by({ mass })).toEqual(scores.map((tiles, head) => listsOfMass(tiles, given[head] ?? [], mass)));
        }
        for (const ofMax of [1, 0.5, 0.04]) {
          expect(await by({ ofMax })).toEqual(scores.map((tiles, head) => listsOfMax(tiles, given[head] ?? [], ofMax)));
        }
      }
    }
  });

  it('counts masses of very different blocks, and takes all where nothing has any', async () => {
    const shape = { tokens: 64 * 200, rows: 128 };
    const options = { ...defaults, sinkTokens: 0, diagonalTokens: 1 };
    const listOf = async (scores: number[], mass: number) => {
      const given = [[scores]];
      return (await listsOf((device) => scoresOf(device, given, shape), 1, shape, { ...options, threshold: { mass } }))[0]?.[0] ?? [];
    };
    // One block with half of the mass, and the other half even.
    const half = Array.from({ length: 200 }, (_, block) => (block === 150 ? 0 : -Math.log(199)));
    expect(await listOf(half, 0.75)).toHaveLength(1 + 99 + 1);
    const tails = half.map((score) => (score === 0 ? -1e20 : -1e30));
    expect(await listOf(tails, 0.99)).toEqual([150, 198, 199]);
    expect(await listOf(half.map(() => -Infinity), 0.5)).toHaveLength(200);
    const positive = half.map((score) => score + 30);
    expect(await listOf(positive, 0.75)).toEqual(await listOf(half, 0.75));
  });

  it('computes a budget to the block, whatever share of it is always taken', async () => {
    const shape = { tokens: 8192, rows: 4096 };
    const flat = [blocksSeen(shape, 128, () => -3)];
    const options = { ...defaults, denseRows: 128 };
    const all = flat.flat(2).length;
    const always = withBlocksAlwaysTaken(flat[0] ?? [], shape, options).flat().filter((score) => score === Infinity).length;
    for (const budget of [0.05, 0.125, 0.25, 0.9]) {
      const lists = await listsOf((device) => scoresOf(device, flat, shape), 1, shape, { ...options, threshold: { budget } });
      expect(lists.flat(2).length).toBe(Math.max(always, Math.ceil(budget * all)));
    }
  });

  it('takes as many blocks a tile as another tile did, and dense rows besides', async () => {
    const random = new Random(12);
    for (const [tokens, rows] of [[2000, 2000], [3001, 700], [4096, 1]] as const) {
      const heads = randomHeads(random, 3, tokens, rows);
      for (const counts of [[0, 0, 0], [3, 5, 4], [20, -7, 0], [9, 40, 31], [1e9, 1e9, 1e9]]) {
        const options = { ...defaults, denseRows: random.pick([0, 200]), tileRows: random.pick([64, 128]) };
        const of = listsOf(
          (device) => partsOf(device, heads),
          3,
          { tokens, rows },
          {
            ...options,
            threshold: (device) => {
              // A column of the lengths of several tiles' lists.
              const lengths = device.tensor('i32', ['queryHead', 'queryTile'], [3, 4], Int32Array.from(counts.flatMap((count) => [7, 7, count, 7])));
              return { tileBlocks: lengths.slice('queryTile', 2, 3) };
            },
          },
        );
        const sum = counts.reduce((all, count) => all + Math.max(0, count), 0);
        const scores = heads.map((head) => blockScores(head, options));
        expect(await of).toEqual(listsOfTileBlocks(scores, sum, { ...options, rows }));
      }
    }
  });

  it('takes without an estimate only what it always takes, however far the diagonal reaches', async () => {
    const shape = { tokens: 8192, rows: 300 };
    for (const diagonalTokens of [1, 100, 5000, 2 ** 31 - 1]) {
      const options = { ...defaults, sinkTokens: 70, diagonalTokens };
      const lists = await listsOf(() => shape, 2, shape, { ...options, threshold: { epsilon: 1 } });
      const wanted = listsAbove(withBlocksAlwaysTaken(blocksSeen(shape, 128, () => -Infinity), shape, options), 0);
      expect(lists).toEqual([wanted, wanted]);
    }
    const all = await listsOf(() => shape, 1, shape, { ...defaults, threshold: { epsilon: 0 } });
    expect(all.flat().map((list) => list.length)).toEqual([126, 128, 128]);
  });

  it('refuses thresholds, options, room and estimates that do not fit', () => {
    const device = open();
    const stream = device.createStream();
    const shape = { tokens: 300, rows: 200 };
    const parts = partsOf(device, randomHeads(new Random(6), 2, 300, 200));
    const tensors = { ...parts, ...listsFor(device, 2, shape, 128) };
    const call = (changes: object) => selectKeyBlocks(stream, { ...tensors, threshold: { budget: 0.5 }, ...changes });
    const tileBlocks = device.tensor('i32', ['queryHead', 'queryTile'], [2, 1]);
    const floats = device.tensor('f32', ['queryHead', 'queryTile'], [2, 1]);
    expect(() => call({ threshold: { tileBlocks: floats } })).toThrow(DTypeError);
    expect(() => call({ threshold: { tileBlocks: tensors.keyBlockCounts } })).toThrow(ShapeError);
    expect(() => call({ threshold: { tileBlocks, budget: 0.5 } })).toThrow(InvalidValueError);
    const thresholds = [{}, { epsilon: 1, budget: 1 }, { epsilon: -1 }, { epsilon: NaN }, { budget: 0 }, { budget: 1.1 }, { mass: 0.5 }, { ofMax: 0.5 }, undefined, 3];
    for (const threshold of thresholds) expect(() => call({ threshold })).toThrow(InvalidValueError);
    for (const wrong of [{ tileRows: 32 }, { denseRows: -1 }, { slashBound: 'mean' }, { sinkTokens: 0.5 }, { diagonalTokens: 0 }]) {
      expect(() => call(wrong)).toThrow(InvalidValueError);
    }
    const lists = (tiles: number, blocks: number): TensorHandle => {
      return device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], [2, tiles, blocks]);
    };
    expect(() => call({ keyBlocks: lists(2, 4) })).toThrow(InvalidValueError);
    expect(() => call({ tileRows: 64 })).toThrow(InvalidValueError);
    const none = { slash: undefined, vertical: undefined, horizontal: undefined };
    const scores = { ...none, ...scoresOf(device, [blocksSeen(shape, 128, () => 0), blocksSeen(shape, 128, () => 0)], shape) };
    const estimates = [none, { vertical: undefined }, { scores: scores.scores }, { ...scores, vertical: parts.vertical }];
    for (const estimate of estimates) expect(() => call(estimate)).toThrow(/the estimate/);
    for (const wrong of [{ tokens: undefined }, { tokens: 400 }, { rows: 301 }, { rows: 0 }, { rows: 50 }, { rows: 1.5 }]) {
      expect(() => call({ ...scores, ...wrong })).toThrow(InvalidValueError);
    }
    const ofScores = [{ mass: 0 }, { mass: 1 }, { ofMax: 0 }, { ofMax: 1.5 }, { mass: 0.5, budget: 0.5 }, { mass: NaN }];
    for (const threshold of ofScores) expect(() => call({ ...scores, threshold })).toThrow(InvalidValueError);
    expect(() => call(scores)).not.toThrow();
    expect(() => call({})).not.toThrow();
  });
});
