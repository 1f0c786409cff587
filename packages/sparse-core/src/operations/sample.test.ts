import { describe, expect, it } from 'vitest';
import { DeviceError, DTypeError, InvalidValueError, ShapeError } from '../errors.js';
import { philox, uniform } from '../testing/philox.js';
import { Random } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { sample, sampleOutcomes, type SampleSettings } from './sample.js';

interface OracleCandidate {
  readonly token: number;
  readonly score: number;
  readonly weight: number;
}

interface Oracle {
  /** In token order. */
  readonly candidates: readonly OracleCandidate[];
  readonly total: number;
  /** How far a cumulative probability of the f32 kernel may be off. */
  readonly tolerance: number;
  /** A filter's bound lies so close to a candidate that f32 may decide otherwise. */
  readonly ambiguous: boolean;
}

function penalised(logits: Float32Array, recent: readonly number[], penalty: number): Float32Array {
  const stored = Math.fround(penalty);
  return logits.map((x, token) => (recent.includes(token) ? (x < 0 ? x * stored : x / stored) : x));
}

function oracle(scores: Float32Array, settings: SampleSettings): Oracle {
  const { temperature = 1, topK = scores.length, topP = 1, minP = 0 } = settings;
  const greatest = scores.reduce((best, x) => Math.max(best, x));
  const argument = (score: number): number => (score - greatest) / Math.fround(temperature);
  const all = [...scores].map((score, token) => ({ token, score, weight: Math.exp(argument(score)) }));
  all.sort((a, b) => (a.score === b.score ? a.token - b.token : b.score - a.score));
  const leading = all.slice(0, topK);
  const sum = (some: readonly OracleCandidate[]): number =>
    some.reduce((total, { weight }) => total + weight, 0);
  // The argument of the exponential rounds twice, relative to itself; the exponential is off by 2 more.
  const error = ({ score, weight }: OracleCandidate): number =>
    weight === 0 ? 0 : weight * (2 * Math.abs(argument(score)) + 3) * 2 ** -24;
  const mass = sum(leading);
  const tolerance = (2 * leading.reduce((errors, each) => errors + error(each), 0)) / mass;
  let ambiguous = false;
  let before = 0;
  const nucleus = leading.filter((each) => {
    const kept = topP === 1 || before < topP * mass;
    if (topP < 1 && Math.abs(before / mass - topP) <= tolerance) ambiguous = true;
    before += each.weight;
    return kept;
  });
  const likely = nucleus.filter((each) => {
    if (minP > 0 && minP < 1 && Math.abs(each.weight - minP) <= error(each)) ambiguous = true;
    return each.weight >= minP;
  });
  const candidates = likely.toSorted((a, b) => a.token - b.token);
  return { candidates, total: sum(candidates), tolerance: (tolerance * mass) / sum(candidates), ambiguous };
}

function randomSettings(random: Random, vocabulary: number): SampleSettings {
  return {
    temperature: random.pick([0.2, 0.7, 1, 1, 1.7]),
    topK: random.pick([vocabulary, 1, 3, 50, vocabulary + 1]),
    topP: random.pick([1, 0.95, 0.5, 0.1]),
    minP: random.pick([0, 0, 0.05, 0.5, 1]),
    repetitionPenalty: random.pick([1, 1.3, 0.8]),
    seed: random.integer(0, 2 ** 53 - 1),
  };
}

describe('the oracle of draws', () => {
  it('gives the known answers of Philox4x32-10', () => {
    const ones = 0xffffffffn;
    expect(philox([0n, 0n, 0n, 0n], [0n, 0n])).toEqual([0x6627e8d5n, 0xe169c58dn, 0xbc57ac4cn, 0x9b00dbd8n]);
    expect(philox([ones, ones, ones, ones], [ones, ones])).toEqual([
      0x408f276dn,
      0x41c83b0en,
      0xa20bc7c6n,
      0x6d5451fdn,
    ]);
  });
});

describeOnDevices('sample', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  /** Samples rows of logits (each followed by a gap) and reads the tokens. */
  async function choose(
    rows: readonly Float32Array[],
    settings: readonly SampleSettings[],
    steps: readonly number[],
    recent: readonly (readonly number[])[] = rows.map(() => []),
    on = stream,
  ): Promise<number[]> {
    const vocabulary = rows[0]?.length ?? 0;
    const width = Math.max(1, ...recent.map((tokens) => tokens.length));
    const packed = Float32Array.from(rows.flatMap((row) => [...row, NaN]));
    const pad = (tokens: readonly number[]): number[] =>
      Array.from({ length: width }, (_, i) => tokens[i] ?? -1);
    const padded = Int32Array.from(recent.flatMap(pad));
    using logits = on.device.tensor('f32', ['row', 'vocabulary'], [rows.length, vocabulary + 1], packed);
    using recentTensor = on.device.tensor('i32', ['row', 'recent'], [rows.length, width], padded);
    using output = on.device.tensor('i32', ['row'], [rows.length]);
    const inner = logits.slice('vocabulary', 0, vocabulary);
    sample(on, { logits: inner, settings, steps, recent: recentTensor, output });
    return [...(await output.read())];
  }

  it('draws the token at which the float64 cumulative probability passes the draw', async () => {
    const random = new Random(8);
    let [checked, skipped] = [0, 0];
    for (let round = 0; round < 120; round++) {
      const [rows, vocabulary] = [random.integer(1, 4), random.pick([1, 5, 40, 1000, 3000])];
      const [scale, grid, masked] = [random.pick([0.5, 3, 12]), random.pick([0, 0.5]), random.pick([0, 0.3])];
      const logits = Array.from({ length: rows }, () =>
        random.elements('f32', vocabulary, scale).map((x, token) => {
          if (token > 0 && random.next() < masked) return -Infinity;
          return grid === 0 ? x : Math.round(x / grid) * grid;
        }),
      );
      const settings = Array.from({ length: rows }, () => randomSettings(random, vocabulary));
      const steps = Array.from({ length: rows }, () => random.integer(0, 2 ** 40));
      const recent = Array.from({ length: rows }, () =>
        Array.from({ length: random.integer(0, 8) }, () => random.integer(0, vocabulary - 1)),
      );
      const tokens = await choose(logits, settings, steps, recent);
      tokens.forEach((token, row) => {
        const { repetitionPenalty = 1, seed = 0, ...filters } = settings[row] ?? {};
        const scores = penalised(logits[row] ?? new Float32Array(), recent[row] ?? [], repetitionPenalty);
        const { candidates, total, tolerance, ambiguous } = oracle(scores, filters);
        if (ambiguous) {
          skipped++;
          return;
        }
        const at = candidates.findIndex((each) => each.token === token);
        expect(at).toBeGreaterThanOrEqual(0);
        const below = candidates.slice(0, at).reduce((sum, { weight }) => sum + weight, 0) / total;
        const drawn = uniform(seed, steps[row] ?? NaN);
        expect(drawn).toBeGreaterThanOrEqual(below - tolerance);
        expect(drawn).toBeLessThanOrEqual(below + (candidates[at]?.weight ?? NaN) / total + tolerance);
        checked++;
      });
    }
    expect(checked).toBeGreaterThan(250);
    expect(skipped).toBeLessThan(checked / 50);
  });

  it('follows the softmax distribution over many steps of one seed', async () => {
    const [vocabulary, draws] = [24, 24_000];
    const logits = new Random(9).elements('f32', vocabulary, 1.5);
    const { candidates, total } = oracle(logits, {});
    const counts = new Array<number>(vocabulary).fill(0);
    const rows = Array.from({ length: draws }, () => logits);
    const tokens = await choose(
      rows,
      rows.map(() => ({ seed: 77 })),
      rows.map((_, step) => step),
    );
    for (const token of tokens) counts[token] = (counts[token] ?? NaN) + 1;
    const statistic = candidates.reduce((sum, { token, weight }) => {
      const expected = (draws * weight) / total;
      return sum + ((counts[token] ?? NaN) - expected) ** 2 / expected;
    }, 0);
    // P(chi-square of k degrees >= k + 2 sqrt(k x) + 2 x) <= e^-x (Laurent and Massart 2000, lemma 1); x = 14
    // is one in a million.
    const degrees = vocabulary - 1;
    expect(statistic).toBeLessThanOrEqual(degrees + 2 * Math.sqrt(degrees * 14) + 2 * 14);
  });

  it('takes the greatest logit at temperature 0, the first of equals', async () => {
    const random = new Random(10);
    const rows = Array.from({ length: 20 }, () => random.elements('f32', 2500, 4).map((x) => Math.round(x)));
    const greedy = rows.map(() => ({ temperature: 0 }));
    const steps = rows.map(() => 0);
    expect(await choose(rows, greedy, steps)).toEqual(rows.map((row) => row.indexOf(Math.max(...row))));
    const zeros = [Float32Array.of(-1, -0, 0), Float32Array.of(-Infinity, -5, -Infinity)];
    expect(await choose(zeros, [{ temperature: 0 }, { temperature: 0 }], [0, 0])).toEqual([1, 1]);
  });

  it('takes the first of the greatest of a large vocabulary, and refuses what is none', async () => {
    const random = new Random(13);
    for (const vocabulary of [40_000, 40_001]) {
      const rows = Array.from({ length: 5 }, () => random.elements('f32', vocabulary, 4).map((x) => Math.round(x)));
      const [first, second, third] = rows;
      if (first) first[vocabulary - 1] = 99;
      for (const index of [39_990, 25_000, 9_000]) if (second) second[index] = 99;
      if (third) third[31_000] = NaN;
      const packed = Float32Array.from(rows.flatMap((row) => [...row]));
      using logits = device.tensor('f32', ['row', 'vocabulary'], [rows.length, vocabulary], packed);
      using output = device.tensor('i32', ['row'], [rows.length]);
      using outcomes = device.tensor('i32', ['row'], [rows.length]);
      const settings = rows.map(() => ({ temperature: 0 }));
      sample(stream, { logits, settings, steps: [0, 0, 0, 0, 0], output, outcomes });
      const wanted = rows.map((row) => row.indexOf(Math.max(...row)));
      expect([...(await output.read())]).toEqual(wanted.with(2, -1));
      expect([...(await outcomes.read())]).toEqual([0, 0, 1, 0, 0]);
    }
  });

  it('penalises each recent token once, however often it occurs', async () => {
    const rows = [Float32Array.of(4, 3, 1), Float32Array.of(-1, -1.5, -9), Float32Array.of(4, 3, 1)];
    const settings = [{ repetitionPenalty: 1.2 }, { repetitionPenalty: 2 }, { repetitionPenalty: 1.5 }];
    const greedy = settings.map((each) => ({ ...each, temperature: 0 }));
    // 4 / 1.2 is still above 3, though 4 / 1.2^2 is not; -1 * 2 falls below -1.5; 4 / 1.5 falls below 3.
    expect(await choose(rows, greedy, [0, 0, 0], [[0, 0], [0], [0, 2]])).toEqual([0, 1, 1]);
  });

  it('keeps exactly topK tokens, the first of equals', async () => {
    const logits = Float32Array.of(1, 2, 1, 2, 1, 1);
    const rows = Array.from({ length: 200 }, () => logits);
    const steps = rows.map((_, step) => step);
    const settings = rows.map(() => ({ topK: 3, seed: 5 }));
    expect(new Set(await choose(rows, settings, steps))).toEqual(new Set([0, 1, 3]));
  });

  it('gives a row the same token whatever its neighbours and the threads', async () => {
    const random = new Random(11);
    const rows = Array.from({ length: 9 }, () => random.elements('f32', 700, 2));
    const settings = rows.map((_, row) => ({ seed: row, topP: 0.9, topK: 100 }));
    const steps = rows.map((_, row) => row * 3);
    const together = await choose(rows, settings, steps);
    const noRecent = rows.map(() => []);
    expect(await choose(rows, settings, steps, noRecent, open(4).defaultStream)).toEqual(together);
    const reversed = await choose(rows.toReversed(), settings.toReversed(), steps.toReversed());
    expect(reversed).toEqual(together.toReversed());
    expect(await choose(rows.slice(4, 5), settings.slice(4, 5), steps.slice(4, 5))).toEqual([together[4]]);
    const later = steps.map((step) => step + 1);
    expect(await choose(rows, settings, later)).not.toEqual(together);
  });

  it.each([
    ['NaN', Float32Array.of(1, 2, NaN, NaN), 'row 1: the score of token 2 is NaN or infinite'],
    ['+infinity', Float32Array.of(1, Infinity, 2, 3), 'row 1: the score of token 1 is NaN or infinite'],
    ['nothing finite', new Float32Array(4).fill(-Infinity), 'row 1: every logit is -infinity'],
  ])('fails the stream on logits with %s', async (_, row, message) => {
    const good = Float32Array.of(1, 2, 3, 4);
    for (const temperature of [0, 1]) {
      const failure: unknown = await choose(
        [good, row],
        [{ temperature }, { temperature }],
        [0, 0],
        undefined,
        device.createStream(),
      ).catch((error: unknown) => error);
      expect(failure).toBeInstanceOf(InvalidValueError);
      expect((failure as Error).message).toContain(`sample: ${message}`);
    }
  });

  it.each([4, -2])('fails the stream when recent token %i is outside the vocabulary', async (token) => {
    const rows = [new Float32Array(4)];
    const chosen = choose(rows, [{ repetitionPenalty: 1.1 }], [0], [[1, token]], device.createStream());
    await expect(chosen).rejects.toThrow(`sample: row 0: recent token ${token} is not one of the 4`);
    await expect(chosen).rejects.toThrow(InvalidValueError);
  });

  it('says in outcomes why a row has no token, and the others keep theirs', async () => {
    const own = device.createStream();
    const random = new Random(12);
    const vocabulary = 4099;
    const bad = (change: (row: Float32Array) => void): Float32Array => {
      const row = random.elements('f32', vocabulary, 2);
      change(row);
      return row;
    };
    const good = Array.from({ length: 5 }, () => random.elements('f32', vocabulary, 2));
    const rows = [
      bad((row) => (row[4098] = NaN)),
      ...good.slice(0, 2),
      bad((row) => (row[7] = Infinity)),
      bad((row) => row.fill(-Infinity)),
      ...good.slice(2),
      bad(() => undefined),
    ];
    const outcomesWanted = [1, 0, 0, 1, 2, 0, 0, 0, 3];
    const recentTokens = rows.map((_, row) => (row === 8 ? vocabulary : -1));
    for (const temperature of [0, 1.3]) {
      const settings = rows.map((_, row) => ({ temperature, seed: row, repetitionPenalty: row === 8 ? 1.5 : 1 }));
      const steps = rows.map((_, row) => row);
      using logits = device.tensor('f32', ['row', 'vocabulary'], [rows.length, vocabulary], Float32Array.from(rows.flatMap((row) => [...row])));
      using recent = device.tensor('i32', ['row', 'recent'], [rows.length, 1], Int32Array.from(recentTokens));
      using output = device.tensor('i32', ['row'], [rows.length], new Int32Array(rows.length).fill(77));
      using outcomes = device.tensor('i32', ['row'], [rows.length], new Int32Array(rows.length).fill(77));
      sample(own, { logits, settings, steps, recent, output, outcomes });
      expect([...(await outcomes.read())]).toEqual(outcomesWanted);
      const chosen = [...(await output.read())];
      const alone = outcomesWanted.flatMap((outcome, row) => (outcome === 0 ? [row] : []));
      const pick = <T>(all: readonly T[]): T[] => alone.map((row) => all[row] as T);
      expect(pick(chosen)).toEqual(await choose(pick(rows), pick(settings), pick(steps)));
      expect(chosen.filter((_, row) => outcomesWanted[row] !== 0)).toEqual([-1, -1, -1, -1]);
    }
    await own.synchronize();
    expect(sampleOutcomes).toHaveLength(4);
  });

  it('refuses bad input with a typed error', () => {
    using logits = device.tensor('f32', ['row', 'vocabulary'], [2, 8]);
    using halves = device.tensor('f16', ['row', 'vocabulary'], [2, 8]);
    using output = device.tensor('i32', ['row'], [2]);
    using reals = device.tensor('f32', ['row'], [2]);
    using recent = device.tensor('i32', ['row', 'recent'], [3, 4]);
    using foreign = open().tensor('i32', ['row'], [2]);
    const good = { logits, settings: [{}, {}], steps: [0, 1], output };
    expect(() => sample(stream, { ...good, logits: halves as never })).toThrow(DTypeError);
    expect(() => sample(stream, { ...good, output: reals as never })).toThrow(DTypeError);
    expect(() => sample(stream, { ...good, output: foreign })).toThrow(DeviceError);
    expect(() => sample(stream, { ...good, output: output.slice('row', 0, 1) })).toThrow(ShapeError);
    expect(() => sample(stream, { ...good, logits: logits.slice('vocabulary', 0, 0) })).toThrow(ShapeError);
    expect(() => sample(stream, { ...good, recent })).toThrow(ShapeError);
    expect(() => sample(stream, { ...good, outcomes: reals as never })).toThrow(DTypeError);
    expect(() => sample(stream, { ...good, outcomes: foreign })).toThrow(DeviceError);
    expect(() => sample(stream, { ...good, outcomes: output.slice('row', 0, 1) })).toThrow(ShapeError);
    expect(() => sample(stream, { ...good, settings: [{}] })).toThrow(ShapeError);
    expect(() => sample(stream, { ...good, steps: [0] })).toThrow(ShapeError);
    for (const bad of [
      { temperature: -1 },
      { temperature: NaN },
      { temperature: 1e-60 },
      { topK: 0 },
      { topK: 1.5 },
      { topP: 0 },
      { topP: 1.1 },
      { minP: -0.1 },
      { seed: -1 },
      { seed: 2 ** 53 },
      { repetitionPenalty: 0 },
      { repetitionPenalty: 1.1 },
    ]) {
      expect(() => sample(stream, { ...good, settings: [{}, bad] })).toThrow(InvalidValueError);
    }
    expect(() => sample(stream, { ...good, steps: [0, -1] })).toThrow(InvalidValueError);
  });
});
