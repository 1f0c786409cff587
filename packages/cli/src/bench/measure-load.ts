import type { Model } from '@kv/model';
import { openPolicy } from '@kv/policies';
import { createEngine } from '@kv/serve-scheduler';
import type { EngineStats } from '@kv/serve-scheduler';
import type { KvBytes } from '@kv/sparse-core';

import { median } from '../compare/median.js';

/** Requests that come at once. */
export interface Load {
  readonly policy: string;
  readonly requests: number;
  readonly promptTokens: number;
  readonly answerTokens: number;
  readonly seed: number;
}

/** What a load took on this machine. Times are in milliseconds. */
export interface MeasuredLoad extends Load {
  /** From the arrival of all to the first token of each, the mean. */
  readonly firstToken: number;
  /** Between two tokens of an answer, the median; undefined for answers of one token. */
  readonly betweenTokens: number | undefined;
  /** Of all answers, from the arrival to the last token. */
  readonly tokensPerSecond: number;
  /** Of the blocks that answers read, those that were loaded, as far as the device told; undefined for a cache in one memory. */
  readonly loadedShare: number | undefined;
  /** The most that the cache held when an answer began; undefined for answers of one token, which end then. */
  readonly kvBytes: KvBytes | undefined;
  /** What it took, in use or not. */
  readonly reservedBytes: KvBytes;
}

/**
 * Serves a load by an engine of its own. Each prompt is of random tokens.
 * @param onToken called for each token of an answer
 * @throws what `openPolicy` and `createEngine` throw; the signal's reason
 */
export async function measureLoad(model: Model, load: Load, signal: AbortSignal, onToken: () => void): Promise<MeasuredLoad> {
  const { policy, requests, promptTokens, answerTokens, seed } = load;
  const cache = { contextTokens: promptTokens + answerTokens, sequences: requests };
  using opened = await openPolicy(policy, model, cache);
  const engine = createEngine(model, { policy: opened.policy, ...cache });
  try {
    const draw = drawing(seed, model.config.vocabularySize);
    const settings = { maxTokens: answerTokens, endIds: [], signal };
    // Brings code and working memory in place.
    await timesOf(engine.generateTokens(draw(promptTokens), settings), () => undefined);
    const prompts = Array.from({ length: requests }, () => draw(promptTokens));
    const before = engine.stats;
    const began = performance.now();
    const held: KvBytes[] = [];
    const answers = await Promise.all(
      prompts.map((prompt) =>
        timesOf(engine.generateTokens(prompt, settings), (count) => {
          if (count === 1 && answerTokens > 1) held.push(engine.runner.kvBytes);
          onToken();
        }),
      ),
    );
    const times = answers.map((each) => each.map((time) => time - began));
    const gaps = times.flatMap((each) => each.slice(1).map((time, index) => time - (each[index] ?? time)));
    return {
      ...load,
      firstToken: times.reduce((sum, [first = NaN]) => sum + first, 0) / requests,
      betweenTokens: gaps.length === 0 ? undefined : median(gaps),
      tokensPerSecond: (1000 * requests * answerTokens) / Math.max(...times.map((each) => each.at(-1) ?? NaN)),
      loadedShare: loadedShare(before, engine.stats),
      kvBytes: mostOf(held),
      reservedBytes: engine.runner.kvReserved,
    };
  } finally {
    await engine.close();
  }
}

/** When each token of an answer came. */
async function timesOf(answer: AsyncIterator<unknown>, onToken: (count: number) => void): Promise<number[]> {
  const times: number[] = [];
  while ((await answer.next()).done !== true) onToken(times.push(performance.now()));
  return times;
}

function loadedShare(before: EngineStats, after: EngineStats): number | undefined {
  const [found, loaded] = [after.blocksFound - before.blocksFound, after.blocksLoaded - before.blocksLoaded];
  return found + loaded > 0 ? loaded / (found + loaded) : undefined;
}

function mostOf(all: readonly KvBytes[]): KvBytes | undefined {
  if (all.length === 0) return undefined;
  return { device: Math.max(...all.map(({ device }) => device)), host: Math.max(...all.map(({ host }) => host)) };
}

/** Draws so many ids of a vocabulary. */
function drawing(seed: number, vocabulary: number): (count: number) => Int32Array {
  let state = seed >>> 0;
  return (count) =>
    Int32Array.from({ length: count }, () => {
      state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
      return Math.floor((state / 2 ** 32) * vocabulary);
    });
}
