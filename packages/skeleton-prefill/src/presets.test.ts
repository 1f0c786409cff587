import { CapabilityError, createRowBatch, densePrefill, InvalidValueError } from '@kv/sparse-core';
import type { KvStore, PrefillAttention, PrefillCall } from '@kv/sparse-core';
import { describeOnDevices } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import { antidiagonalPrefill } from './antidiagonal-prefill.js';
import { clusteredPrefill } from './clustered-prefill.js';
import { pooledPrefill } from './pooled-prefill.js';
import { skeletonPrefill } from './skeleton-prefill.js';
import { streamingPrefill } from './streaming-prefill.js';
import { joined, Layer, layer, type Prompt, type Step, syntheticPrompt } from './testing/prompt-layer.js';
import { verticalSlashPrefill } from './vertical-slash-prefill.js';

interface Settings {
  readonly budget: number;
  readonly denseLastRows?: number;
}

interface Preset {
  readonly name: string;
  readonly make: (settings: Settings) => PrefillAttention;
  /** Thresholds besides a budget of 1 with which nothing may be lost. */
  readonly lossless: readonly object[];
  /** What the name of one begins with. */
  readonly label: string;
  /** How long a prompt is for which its estimate is worth it on CUDA. */
  readonly tokensOnCuda: number;
  /** How far from its budget it may be. A window has one block more in all 12 tiles at once, of 54 blocks that are the budget. */
  readonly margin: number;
  /** Settings that only this one refuses. */
  readonly refused: readonly object[];
}

const few = { sinkTokens: 4, diagonalTokens: 16, denseLastRows: 0 };
const epsilons = [{ epsilon: 0 }, { epsilon: 1e-37 }];
const refused = [{ epsilon: -1 }, { epsilon: 1, budget: 1 }, { budget: 0.1, diagonalTokens: 0 }, { budget: 0.1, diagonalTokens: 4097 }];
const scored = { lossless: epsilons, tokensOnCuda: 1500, margin: 0.02, refused: [...refused, { mass: 1.5 }, { ofMax: 0 }] };
const presets: readonly Preset[] = [
  {
    name: 'skeletonPrefill',
    make: (of) => skeletonPrefill({ ...few, samples: 400, ...of }),
    lossless: epsilons,
    label: 'skeleton',
    tokensOnCuda: 12_000,
    margin: 0.02,
    refused: [...refused, { mass: 0.9 }],
  },
  { ...scored, name: 'clusteredPrefill', make: (of) => clusteredPrefill({ ...few, ...of }), label: 'clustered' },
  { ...scored, name: 'pooledPrefill', make: (of) => pooledPrefill({ ...few, ...of }), label: 'pooled' },
  { ...scored, name: 'antidiagonalPrefill', make: (of) => antidiagonalPrefill({ ...few, stride: 16, ...of }), label: 'antidiagonal' },
  {
    ...scored,
    name: 'verticalSlashPrefill',
    make: (of) => verticalSlashPrefill({ ...few, ...of }),
    label: 'vertical-slash',
    tokensOnCuda: 12_000,
  },
  {
    name: 'streamingPrefill',
    make: (of) => streamingPrefill({ denseLastRows: 0, ...of }),
    lossless: [{ windowTokens: 1500 }, { windowTokens: 2 ** 31 - 1 }],
    label: 'streaming',
    tokensOnCuda: 1500,
    margin: 0.25,
    refused: [{ windowTokens: 0 }, { windowTokens: 100, budget: 0.1 }],
  },
];

describe.each(presets)('$name', ({ make, lossless, label, tokensOnCuda, margin, refused: ownRefused }) => {
  describeOnDevices('over dense prompts', ({ name, open }) => {
    const layerOf = (prefill: PrefillAttention) => {
      const device = open();
      return new Layer(device, device.createStream(), prefill);
    };
    const method = (settings: Settings) => layerOf(make(settings));
    const prompt = syntheticPrompt(1, 1500);
    const tokens = name === 'cuda' ? tokensOnCuda : 1500;

    it('computes all where nothing may be lost, bit for bit as dense attention', async () => {
      const wanted = await layerOf(densePrefill()).read(prompt, [700, 1500]);
      for (const settings of [...lossless, { budget: 1 }]) {
        const given = await method(settings as Settings).read(prompt, [700, 1500]);
        expect(given.output).toEqual(wanted.output);
        expect(given.reports.map(({ density }) => density)).toEqual([1, 1]);
      }
    });

    it('computes its budget', async () => {
      const { output, reports } = await method({ budget: 0.35 }).read(syntheticPrompt(1, tokens), [tokens]);
      expect(reports[0]?.fallback).toBeUndefined();
      expect(Math.abs((reports[0]?.density ?? NaN) / 0.35 - 1)).toBeLessThan(margin);
      expect(output.every(Number.isFinite)).toBe(true);
    });

    it('keeps the last rows of a prompt dense', async () => {
      const long = syntheticPrompt(1, tokens);
      const dense = await layerOf(densePrefill()).read(long, [700, tokens]);
      const given = await method({ budget: 0.3, denseLastRows: 100 }).read(long, [700, tokens]);
      expect(given.output.slice(-100 * 4 * 32)).toEqual(dense.output.slice(-100 * 4 * 32));
      expect(given.output).not.toEqual(dense.output);
    });

    it('reads a batch as it reads each prompt alone, short ones densely', async () => {
      const [other, short] = [syntheticPrompt(2, 1200), syntheticPrompt(3, 40)];
      const whole = (slot: number, of: Prompt): Step => ({ slot, position: 0, rows: of.tokens, prompt: of, ends: true });
      const { output } = await method({ budget: 0.4 }).step([whole(0, short), whole(2, prompt), whole(1, other)]);
      const alone = await Promise.all([short, prompt, other].map((of) => method({ budget: 0.4 }).read(of, [of.tokens])));
      expect(output).toEqual(joined(alone.map((each) => each.output)));
      expect(alone[0]?.reports[0]?.fallback).toMatch(/longer than it saves/);
    });

    it('goes on with a forked prompt as with the prompt, and keeps nothing of one that ended', async () => {
      const reading = method({ budget: 0.4 });
      await reading.read(prompt, [600, 1000], 1);
      const rest = (slot: number): Step => ({ slot, position: 1000, rows: 500, prompt, ends: true });
      reading.fork(1, 2);
      const forked = await reading.step([rest(2)]);
      const own = await reading.step([rest(1)]);
      expect(forked.output).toEqual(own.output);
      const again = await method({ budget: 0.4 }).read(prompt, [600, 1000, 1500]);
      expect(own.output).toEqual(again.output.slice(1000 * 4 * 32));
      expect(reading.state?.bytes()).toEqual({ device: 0, host: 0 });
    });

    it('computes densely what had tokens dropped', async () => {
      const reading = method({ budget: 0.4 });
      await reading.read(prompt, [1000]);
      reading.keepEverySecond(0, 1000);
      const { report } = await reading.step([{ slot: 0, position: 1000, rows: 500, prompt, ends: true }]);
      expect(report).toEqual({ density: 1, fallback: 'tokens of the sequence were dropped' });
    });

    it('shows a NaN in the rows that see it only', async () => {
      const query = prompt.query.slice();
      query.fill(NaN, (800 * 4 + 2) * 32, (800 * 4 + 3) * 32);
      const { output } = await method({ budget: 0.4 }).read({ ...prompt, query }, [1500]);
      const rows = Array.from({ length: 1500 * 4 }, (_, row) => output.subarray(row * 32, (row + 1) * 32));
      expect(rows.flatMap((row, index) => (row.every(Number.isFinite) ? [] : [index]))).toEqual([800 * 4 + 2]);
    });

    it('shows a key that is NaN in all rows that see it, and in no other', async () => {
      const keys = prompt.keys.slice();
      keys.fill(NaN, 800 * 2 * 32, (800 * 2 + 1) * 32);
      const { output } = await method({ budget: 0.4 }).read({ ...prompt, keys }, [1500]);
      const rows = Array.from({ length: 1500 * 4 }, (_, row) => output.subarray(row * 32, (row + 1) * 32));
      const found = rows.flatMap((row, index) => (row.every(Number.isFinite) ? [] : [index]));
      const seeing = Array.from({ length: 700 * 2 }, (_, row) => (800 + (row >> 1)) * 4 + (row & 1));
      expect(found.length).toBeGreaterThan(0);
      // A window leaves the key behind.
      expect(label === 'streaming' ? seeing : found).toEqual(label === 'streaming' ? expect.arrayContaining(found) : seeing);
    });

    it('refuses, by name, a store without dense blocks', () => {
      const stream = open().createStream();
      const batch = createRowBatch(stream.device, stream, [{ slot: 0, position: 0, rows: 1 }]);
      const blind = { name: 'blind', layer, denseBlocks: () => undefined } as unknown as KvStore;
      const attend = () => make({ budget: 0.4 }).attend(stream, { store: blind, batch } as unknown as PrefillCall);
      expect(attend).toThrow(CapabilityError);
      expect(attend).toThrow(new RegExp(`'${label} 0.4'.*'blind'`));
    });
  });

  it('refuses options out of range', () => {
    const common = [{}, { budget: 0 }, { budget: 2 }, { budget: 0.1, denseLastRows: -1 }, { budget: 0.1, sinkTokens: 5000 }];
    for (const settings of [...common, ...ownRefused]) expect(() => make(settings as Settings), JSON.stringify(settings)).toThrow(InvalidValueError);
  });
});

describe.each(presets.filter(({ refused: of }) => of === scored.refused))('$name', ({ make, label, tokensOnCuda }) => {
  describeOnDevices('by a share of each tile', ({ name, open }) => {
    it.each(['mass', 'ofMax'] as const)('takes more blocks as %s asks for more', async (rule) => {
      const prompt = syntheticPrompt(5, name === 'cuda' ? tokensOnCuda : 1500);
      const densities: number[] = [];
      for (const share of rule === 'mass' ? [0.3, 0.9, 0.999] : [0.9, 0.1, 1e-3]) {
        const prefill = make({ [rule]: share } as never);
        expect(prefill.name).toBe(`${label} ${rule} = ${share}`);
        const device = open();
        const { reports } = await new Layer(device, device.createStream(), prefill).read(prompt, [prompt.tokens]);
        densities.push(reports[0]?.density ?? NaN);
      }
      const [least, middle, most] = densities as [number, number, number];
      expect(least).toBeLessThan(middle);
      expect(middle).toBeLessThan(most);
    });
  });
});
