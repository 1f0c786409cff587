import { type Device, DTypeError, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { describeOnDevices, encode, expectRefusals, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { scoredTokens, type ScoredSizes, type ScoredTokens } from '../testing/scored-tokens.js';
import { type MissingMass, selectByMass, type SelectByMassArguments } from './select-by-mass.js';

interface Settings {
  readonly tau: number;
  readonly missingMass?: MissingMass;
  /** Of all rows and heads. Default: minus infinity. */
  readonly dense?: number;
  /** Of each row of values. */
  readonly scales?: Float64Array;
  readonly ranges?: SelectByMassArguments['ranges'];
}

const sizes: ScoredSizes = {
  rows: [1, 2],
  tokens: [
    [192, 64],
    [0, 128],
  ],
  kvHeads: 2,
  group: 3,
  chosen: 192,
  score: () => 0,
};

/** Enqueues the choice and reads it. */
async function choose(device: Device, given: ScoredTokens, settings: Settings, stream = device.createStream()) {
  const { tau, missingMass, dense, scales, ranges } = settings;
  const { scores, keyCounts, valueRows, weights, counts, logSumExp } = given.arguments;
  const [tokens, queryHeads] = scores.shape;
  const heads = (numbers: number) => device.tensor('f32', ['token', 'queryHead'], [tokens, queryHeads], new Float32Array(tokens * queryHeads).fill(numbers));
  const blocks = given.arguments.valueBlocks;
  const [slots, kvHeads] = keyCounts.shape;
  const meanRows = Int32Array.from({ length: slots * kvHeads }, (_, index) => index);
  selectByMass(stream, {
    ...given.arguments,
    tau,
    missingMass,
    ranges,
    denseLogSumExp: dense === undefined ? undefined : heads(dense),
    valueScales: scales && device.tensor('bf16', ['valueBlock', 'blockToken'], [blocks, 64], encode('bf16', scales)),
    meanRows: missingMass === 'meanValue' ? device.tensor('i32', ['slot', 'kvHead'], [slots, kvHeads], meanRows) : undefined,
  });
  const [rowNumbers, allWeights, listCounts, sums] = [await valueRows.read(stream), await weights.read(stream), await counts.read(stream), await logSumExp.read(stream)];
  const [, , chosen, group] = weights.shape;
  return {
    counts: listCounts,
    logSumExp: (row: number, head: number) => sums[row * queryHeads + head] ?? NaN,
    rows: (row: number, kvHead: number) => {
      const first = (row * kvHeads + kvHead) * chosen;
      return [...rowNumbers.subarray(first, first + (listCounts[row * kvHeads + kvHead] ?? NaN))];
    },
    /** Of the i-th listed row, for a query head. */
    weight: (row: number, queryHead: number, i: number) =>
      allWeights[((row * kvHeads + Math.floor(queryHead / group)) * chosen + i) * group + (queryHead % group)] ?? NaN,
    bytes: [rowNumbers, allWeights, listCounts, sums].map((numbers) => new Uint8Array(numbers.buffer)),
  };
}

type Choice = Awaited<ReturnType<typeof choose>>;

// A difference of scores is rounded (2^-24 of up to 26), and a share has 22 bits.
const shareError = 26 * 2 ** -24 + 2 ** -22;

/** By a sort: the fewest tokens that reach tau, and how many more or fewer rounding may take. */
function sorted(given: ScoredTokens, entry: number, row: number, head: number, kvHead: number, { tau, dense = -Infinity }: Settings) {
  const tokens = Array.from({ length: given.tokensOf(entry, kvHead) }, (_, token) => token);
  const score = (token: number) => given.score(row, head, token);
  const largest = Math.max(...tokens.map(score));
  const most = Math.max(dense, largest);
  const counts = (token: number) => score(token) > -Infinity && Math.fround(largest - score(token)) < 26;
  const order = tokens.filter(counts).sort((a, b) => score(b) - score(a) || a - b);
  const share = (x: number) => (x === -Infinity ? 0 : Math.exp(x - most));
  const total = order.reduce((sum, token) => sum + share(score(token)), 0);
  const all = total + share(dense);
  const reach = (wanted: number) => {
    let sum = share(dense);
    let taken = 0;
    for (; taken < order.length && sum < wanted * all; taken++) sum += share(score(order[taken] ?? NaN));
    return taken;
  };
  const range = tau === 1 ? [order.length, order.length] : [reach(tau * (1 - shareError)), reach(tau * (1 + shareError))];
  return { order, fewest: range[0] ?? NaN, most: range[1] ?? NaN, logOfCoded: most + Math.log(total), logOfAll: most + Math.log(all) };
}

/** Checks lists with room for all against a sort; scores have no NaN. */
function check(given: ScoredTokens, { tokens, kvHeads, group }: ScoredSizes, choice: Choice, settings: Settings) {
  const { missingMass = 'renormalise', scales } = settings;
  for (let row = 0; row < given.rows; row++) {
    const entry = given.entryOf(row);
    for (let kvHead = 0; kvHead < kvHeads; kvHead++) {
      const listed = choice.rows(row, kvHead);
      const all = Array.from({ length: tokens[entry]?.[kvHead] ?? NaN }, (_, token) => token);
      const tokenOf = new Map(all.map((token) => [given.valueRow(entry, kvHead, token), token]));
      const hasMean = missingMass === 'meanValue' && listed.length > 0;
      const meanRow = hasMean ? listed.pop() : undefined;
      if (hasMean) expect(meanRow).toBe((tokens.length - 1 - entry) * kvHeads + kvHead);
      const union = listed.map((valueRow) => tokenOf.get(valueRow) ?? NaN);
      expect(union).toEqual([...union].sort((a, b) => a - b));
      const scale = (valueRow: number) => scales?.[valueRow] ?? 1;
      const taken = new Set<number>();
      for (let head = kvHead * group; head < (kvHead + 1) * group; head++) {
        const wanted = sorted(given, entry, row, head, kvHead, settings);
        // What a head took has a weight.
        const own = union.filter((_, i) => choice.weight(row, head, i) !== 0);
        own.forEach((token) => taken.add(token));
        expect(own.length).toBeGreaterThanOrEqual(wanted.fewest);
        expect(own.length).toBeLessThanOrEqual(wanted.most);
        expect(new Set(own)).toEqual(new Set(wanted.order.slice(0, own.length)));
        const share = own.reduce((sum, token) => sum + Math.exp(given.score(row, head, token) - wanted.logOfCoded), 0);
        const logSumExp = wanted.logOfCoded + (missingMass === 'renormalise' ? Math.log(share) : 0);
        const found = choice.logSumExp(row, head);
        if (!Number.isFinite(logSumExp)) expect(found).toBe(-Infinity);
        else expect(Math.abs(found - logSumExp)).toBeLessThanOrEqual(shareError + 2 ** -23 * Math.abs(logSumExp) + 2 ** -23);
        union.forEach((token, i) => {
          if (!own.includes(token)) expect(choice.weight(row, head, i)).toBe(0);
          if (!own.includes(token)) return;
          const weight = Math.exp(given.score(row, head, token) - logSumExp) * scale(listed[i] ?? NaN);
          // The best share is 2^38, and others are whole numbers.
          expect(Math.abs(choice.weight(row, head, i) - weight)).toBeLessThanOrEqual(weight * 2 * shareError + 2 ** -36);
        });
        if (hasMean) {
          const rest = choice.weight(row, head, union.length) / scale(meanRow ?? NaN);
          if (own.length > 0) expect(Math.abs(rest - (1 - share))).toBeLessThanOrEqual(4 * shareError);
        }
      }
      expect(taken.size).toBe(union.length);
    }
  }
}

/** Scores of some spread, a few of them odd. */
function randomScores(random: Random, odd: readonly number[]) {
  const spread = random.pick([0.1, 1, 3, 20]);
  const levels = random.pick([0, 3]);
  return () => {
    if (odd.length > 0 && random.next() < 0.05) return random.pick(odd);
    const score = spread * random.normal();
    return levels === 0 ? score : Math.round(score * levels) / levels;
  };
}

const tauOf = (random: Random) => random.pick([0.3, 0.9, 0.99, 0.9999, 1]);

describeOnDevices('selectByMass', ({ open }) => {
  it('takes what a sort takes, over random sizes, scores with ties and minus infinity, and windows', async () => {
    const device = open();
    const random = new Random(1);
    for (let round = 0; round < 30; round++) {
      const kvHeads = random.integer(1, 3);
      const rows = Array.from({ length: random.integer(1, 3) }, () => random.pick([0, 1, 1, 2]));
      const tokens = rows.map(() => Array.from({ length: kvHeads }, () => random.pick([0, 1, 64, 200, 500])));
      const missingMass = random.pick(['renormalise', 'paper', 'meanValue'] as const);
      const given: ScoredSizes = {
        rows,
        tokens,
        kvHeads,
        group: random.integer(1, 5),
        chosen: 501,
        score: randomScores(random, random.pick([[], [-Infinity, 0, -0]])),
      };
      const scored = scoredTokens(device, random, given);
      const scales = Float64Array.from({ length: scored.arguments.valueBlocks * 64 }, () => 2 ** random.integer(-9, 0));
      const settings: Settings = {
        tau: tauOf(random),
        missingMass,
        ...random.pick([{}, { dense: random.normal() * 5 }, { dense: 5 }, { dense: 40 }, { scales }]),
      };
      check(scored, given, await choose(device, scored, settings), settings);
    }
  });

  it.each([1000, 70000])('takes exactly tau of %i equal scores, the lower ones', async (count) => {
    const device = open();
    const given = { ...sizes, rows: [1], tokens: [[count]], kvHeads: 1, group: 1, chosen: count, score: () => -3 };
    const scored = scoredTokens(device, new Random(2), given);
    const choice = await choose(device, scored, { tau: 0.25 });
    expect(choice.rows(0, 0)).toEqual(Array.from({ length: count / 4 }, (_, token) => scored.valueRow(0, 0, token)));
    expect(choice.weight(0, 0, 7)).toBeCloseTo(4 / count, 9);
    // As much share of keys that are elsewhere counts first.
    const behind = await choose(device, scored, { tau: 0.75, dense: -3 + Math.log(count) });
    expect(Math.abs(behind.rows(0, 0).length - count / 2)).toBeLessThanOrEqual(Math.ceil(count * shareError * 4));
  });

  it('takes one key above all, and nothing where windows are above all', async () => {
    const device = open();
    const given = { ...sizes, score: (_: number, __: number, token: number) => (token === 17 ? 30 : 0) };
    const scored = scoredTokens(device, new Random(3), given);
    const choice = await choose(device, scored, { tau: 0.999 });
    expect(choice.rows(0, 0)).toEqual([scored.valueRow(0, 0, 17)]);
    expect(choice.logSumExp(0, 0)).toBe(30);
    const none = await choose(device, scored, { tau: 0.999, dense: 60 });
    expect([...none.counts]).toEqual([0, 0, 0, 0, 0, 0, 0, 0]);
    expect(none.logSumExp(0, 0)).toBe(-Infinity);
    const paper = await choose(device, scored, { tau: 0.999, dense: 60, missingMass: 'paper' });
    expect(paper.logSumExp(0, 0)).toBe(30);
  });

  it('agrees with a sort for many thousands of tokens, close together or far apart', async () => {
    const device = open();
    const random = new Random(4);
    for (const spread of [0.001, 1, 6]) {
      const given = { ...sizes, rows: [1], tokens: [[20000]], kvHeads: 1, group: 2, chosen: 20000, score: () => spread * random.normal() };
      const scored = scoredTokens(device, random, given);
      for (const tau of [0.5, 0.97]) {
        const choice = await choose(device, scored, { tau });
        const taken = [0, 1].map((head) => {
          const wanted = sorted(scored, 0, 0, head, 0, { tau });
          return wanted.order.slice(0, wanted.most);
        });
        const rows = (tokens: readonly number[]) => new Set(tokens.map((token) => scored.valueRow(0, 0, token)));
        const [most, listed] = [rows(taken.flat()), choice.rows(0, 0)];
        expect(listed.every((row) => most.has(row))).toBe(true);
        const slack = [0, 1].map((head) => sorted(scored, 0, 0, head, 0, { tau })).reduce((sum, { fewest, most: last }) => sum + last - fewest, 0);
        expect(listed.length).toBeGreaterThanOrEqual(most.size - slack);
      }
    }
  });

  it.each([0, 1] as const)('keeps the tokens of the largest shares where there is no room for all (mean value: %i)', async (mean) => {
    const device = open();
    const random = new Random(5);
    for (const room of [1, 2, 7, 100]) {
      const given = { ...sizes, tokens: [[400, 64], [0, 200]], chosen: room + mean, score: randomScores(random, []) };
      const scored = scoredTokens(device, random, given);
      const settings = { tau: 1, dense: 1, missingMass: mean === 1 ? 'meanValue' : 'renormalise' } as const;
      const choice = await choose(device, scored, settings);
      for (let row = 0; row < scored.rows; row++) {
        for (let kvHead = 0; kvHead < given.kvHeads; kvHead++) {
          const entry = scored.entryOf(row);
          const heads = Array.from({ length: given.group }, (_, head) => kvHead * given.group + head);
          const sums = heads.map((head) => sorted(scored, entry, row, head, kvHead, settings).logOfAll);
          const share = (token: number) => Math.max(...heads.map((head, i) => scored.score(row, head, token) - (sums[i] ?? NaN)));
          const all = Array.from({ length: scored.tokensOf(entry, kvHead) }, (_, token) => token);
          const listed = new Set(choice.rows(row, kvHead).slice(0, room));
          const kept = all.filter((token) => listed.has(scored.valueRow(entry, kvHead, token)));
          expect(kept).toHaveLength(Math.min(room, all.length));
          const dropped = all.filter((token) => !kept.includes(token));
          const least = Math.min(...kept.map(share));
          expect(Math.max(...dropped.map(share), -Infinity)).toBeLessThanOrEqual(least + 2 ** -18);
          // Weights are of what is left.
          for (const head of heads) {
            const sum = kept.reduce((total, _, i) => total + choice.weight(row, head, i), 0);
            // Of what is left, a head may have nothing that counts.
            const whole = choice.logSumExp(row, head) === -Infinity ? 0 : 1;
            expect(sum + (mean === 1 && kept.length > 0 ? choice.weight(row, head, kept.length) : 0)).toBeCloseTo(whole, 4);
          }
        }
      }
    }
  });

  it('keeps the lower tokens of equal shares', async () => {
    const device = open();
    const scored = scoredTokens(device, new Random(6), { ...sizes, chosen: 50, score: () => 2 });
    const choice = await choose(device, scored, { tau: 1 });
    expect(choice.rows(0, 0)).toEqual(Array.from({ length: 50 }, (_, token) => scored.valueRow(0, 0, token)));
  });

  it.each([
    ['equal', () => 2],
    ['of few levels', (_: number, token: number) => ((token * token) % 7) / 1000],
    ['nearly equal', (head: number, token: number) => Math.sin(head + token * token) / 1000],
  ] as const)('keeps the tokens of the largest shares among many thousands that are %s', async (name, score) => {
    const device = open();
    const [tokens, chosen] = [90000, 30000];
    const given = { ...sizes, rows: [1], tokens: [[tokens]], kvHeads: 1, group: 2, chosen, score: (_: number, head: number, token: number) => score(head, token) };
    const scored = scoredTokens(device, new Random(13), given);
    const choice = await choose(device, scored, { tau: 1 });
    const logs = [0, 1].map((head) => sorted(scored, 0, 0, head, 0, { tau: 1 }).logOfAll);
    const all = Array.from({ length: tokens }, (_, token) => token);
    const shares = all.map((token) => Math.max(...logs.map((log, head) => scored.score(0, head, token) - log)));
    const tokenOf = new Map(all.map((token) => [scored.valueRow(0, 0, token), token]));
    const listed = choice.rows(0, 0).map((row) => tokenOf.get(row) ?? NaN);
    const best = all.sort((a, b) => (shares[b] ?? NaN) - (shares[a] ?? NaN) || a - b);
    expect(listed).toHaveLength(chosen);
    if (name !== 'nearly equal') expect(listed).toEqual(best.slice(0, chosen).sort((a, b) => a - b));
    const least = shares[best[chosen - 1] ?? NaN] ?? NaN;
    expect(listed.every((token) => (shares[token] ?? NaN) >= least - 2 ** -18)).toBe(true);
    for (const head of [0, 1]) expect(listed.reduce((sum, _, i) => sum + choice.weight(0, head, i), 0)).toBeCloseTo(1, 4);
  });

  it('takes the same where ranges of scores are given, which say less than scores', async () => {
    const device = open();
    const random = new Random(14);
    for (const odd of [[], [-Infinity, 0, -0], [NaN, Infinity]]) {
      const given = { ...sizes, chosen: 40, score: randomScores(random, odd) };
      const scored = scoredTokens(device, random, given);
      const [tokens, heads, keys] = scored.arguments.scores.shape;
      const numbers = await scored.arguments.scores.read();
      const parts = 3;
      const bounds = Float32Array.from({ length: tokens * heads * parts * 2 }, (_, i) => {
        const [row, kvHead] = [Math.floor(i / (heads * parts * 2)), Math.floor((Math.floor(i / (parts * 2)) % heads) / given.group)];
        const count = row < scored.rows ? scored.tokensOf(scored.entryOf(row), kvHead) : 0;
        const first = Math.floor(i / (parts * 2)) * keys;
        const own = numbers.subarray(first, first + count).filter((_, token) => token % parts === Math.floor(i / 2) % parts);
        return i % 2 === 0 ? Math.min(...own) : Math.max(...own);
      });
      const ranges = device.tensor('f32', ['token', 'queryHead', 'part', 'bound'], [tokens, heads, parts, 2], bounds);
      const wanted = await choose(device, scored, { tau: 0.9 });
      const found = await choose(device, scored, { tau: 0.9, ranges });
      expect(found.bytes).toEqual(wanted.bytes);
    }
  });

  it('shows NaN and plus infinity in their row and head alone, which takes no token', async () => {
    const device = open();
    for (const odd of [NaN, Infinity]) {
      const score = (row: number, head: number, token: number) => (row === 0 && head === 1 && token === 100 ? odd : Math.sin(token));
      const given = { ...sizes, score };
      const scored = scoredTokens(device, new Random(7), given);
      const choice = await choose(device, scored, { tau: 0.9 });
      const sound = await choose(device, scoredTokens(device, new Random(7), { ...given, score: (_, __, token) => Math.sin(token) }), { tau: 0.9 });
      expect(choice.logSumExp(0, 1)).toBeNaN();
      expect(choice.rows(0, 0)).toEqual(sound.rows(0, 0));
      choice.rows(0, 0).forEach((_, i) => {
        expect(choice.weight(0, 1, i)).toBe(0);
        expect(choice.weight(0, 0, i)).toBe(sound.weight(0, 0, i));
      });
      expect(choice.logSumExp(1, 1)).toBe(sound.logSumExp(1, 1));
    }
    const scored = scoredTokens(device, new Random(7), sizes);
    for (const dense of [NaN, Infinity]) {
      const choice = await choose(device, scored, { tau: 0.9, dense });
      expect(choice.logSumExp(0, 0)).toBeNaN();
      expect(choice.rows(0, 0)).toEqual([]);
    }
  });

  it('lists nothing for rows that no entry has, nor for slots without tokens', async () => {
    const device = open();
    const scored = scoredTokens(device, new Random(8), sizes);
    const choice = await choose(device, scored, { tau: 0.9, missingMass: 'meanValue' });
    expect([...choice.counts].slice(-2)).toEqual([0, 0]);
    expect(choice.rows(1, 0)).toEqual([]);
    expect(choice.logSumExp(1, 0)).toBe(-Infinity);
  });

  it('gives the same bits for any number of threads, in host memory, recorded and repeated', async () => {
    const results = [];
    for (const threads of [1, 2, 5]) {
      const device = open(threads);
      const given = { ...sizes, rows: [1], tokens: [[9000, 3000]], chosen: 2000, score: (row: number, head: number, token: number) => Math.sin(head + token * token) * 4 };
      const scored = scoredTokens(device, new Random(9), given);
      results.push((await choose(device, scored, { tau: 0.8 })).bytes);
      const [all, kvHeads, chosen, group] = scored.arguments.weights.shape;
      const host = {
        ...scored.arguments,
        valueRows: await device.hostTensor('i32', ['token', 'kvHead', 'chosen'], [all, kvHeads, chosen]),
        weights: await device.hostTensor('f32', ['token', 'kvHead', 'chosen', 'groupHead'], [all, kvHeads, chosen, group]),
        counts: await device.hostTensor('i32', ['token', 'kvHead'], [all, kvHeads]),
      };
      const stream = device.createStream();
      stream.write(host.valueRows, new Int32Array(all * kvHeads * chosen).fill(-7));
      stream.write(host.weights, new Float32Array(all * kvHeads * chosen * group));
      using recording = stream.record(() => {
        selectByMass(stream, { ...host, tau: 0.8 });
      });
      for (let round = 0; round < 4; round++) stream.replay(recording);
      const read = [await host.valueRows.read(stream), await host.weights.read(stream), await host.counts.read(stream), await host.logSumExp.read(stream)];
      results.push(read.map((numbers) => new Uint8Array(numbers.buffer)));
    }
    for (const result of results) expect(result).toEqual(results[0]);
  });

  it('writes lists alone where no weights are given', async () => {
    const device = open();
    const given = scoredTokens(device, new Random(12), { ...sizes, score: (row, head, token) => Math.sin(row + head * token) * 5 });
    const { bytes: [rows, , counts, logSumExp] } = await choose(device, given, { tau: 0.8 });
    const stream = device.createStream();
    stream.write(given.arguments.valueRows, new Int32Array(given.arguments.valueRows.byteLength / 4).fill(-7));
    selectByMass(stream, { ...given.arguments, weights: undefined, tau: 0.8 });
    const { valueRows, counts: listCounts, logSumExp: sums } = given.arguments;
    const read = [await valueRows.read(stream), await listCounts.read(stream), await sums.read(stream)];
    expect(read.map((numbers) => new Uint8Array(numbers.buffer))).toEqual([rows, counts, logSumExp]);
  });

  it.each([
    ['counts more tokens than have scores', 'keyCounts', 1000],
    ['counts fewer than none', 'keyCounts', -64],
    ['names a block that there is not', 'blockTable', 1 << 20],
    ['names a slot that there is not', 'slots', 2],
    ['has rows that descend', 'queryStart', 99],
  ] as const)('rejects the wait for a batch that %s', async (_, tensor, number) => {
    const device = open();
    const scored = scoredTokens(device, new Random(10), sizes);
    const stream = device.createStream();
    const spoilt = scored.arguments[tensor];
    stream.write(spoilt, (await spoilt.read()).fill(number));
    await expect(choose(device, scored, { tau: 0.9 }, stream)).rejects.toThrow(InvalidValueError);
  });

  it('refuses bad input with a typed error', () => {
    const device = open();
    const stream = device.createStream();
    const good = { ...scoredTokens(device, new Random(11), sizes).arguments, tau: 0.9 };
    const meanRows = device.tensor('i32', ['slot', 'kvHead'], [2, 2]);
    expectRefusals(selectByMass, stream, good, [
      [{ tau: 0 }, InvalidValueError],
      [{ tau: 1.5 }, InvalidValueError],
      [{ tau: NaN }, InvalidValueError],
      [{ missingMass: 'none' }, InvalidValueError],
      [{ missingMass: 'meanValue' }, InvalidValueError],
      [{ meanRows }, InvalidValueError],
      [{ missingMass: 'meanValue', meanRows, weights: undefined }, InvalidValueError],
      [{ valueBlocks: -1 }, InvalidValueError],
      [{ weights: device.tensor('f32', ['token', 'kvHead', 'chosen', 'groupHead'], [4, 2, 192, 2]) }, ShapeError],
      [{ valueScales: device.tensor('bf16', ['valueBlock', 'blockToken'], [1, 64]) }, ShapeError],
      [{ counts: good.logSumExp }, DTypeError],
      [{ ranges: device.tensor('f32', ['token', 'queryHead', 'part', 'bound'], [4, 6, 0, 2]) }, InvalidValueError],
    ]);
  });
});
