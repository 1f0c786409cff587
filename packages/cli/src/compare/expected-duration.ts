import { prefill } from '@kv/model';
import type { Model } from '@kv/model';

/** Tokens of a document's beginning that are read to see how fast it goes. */
const mostTokens = 2048;

/** What is read is cut short after this time. */
const longestTrial = 1;

/**
 * About how many seconds a model takes to read a document: a quick measurement of its beginning, carried on. A token
 * costs the more the more stand before it.
 * @throws what `prefill` throws
 */
export async function expectReading(model: Model, document: Int32Array, signal: AbortSignal): Promise<number> {
  const beginning = document.subarray(0, mostTokens);
  using runner = model.createRunner({ sequences: 1, contextTokens: beginning.length, maxBatchRows: 256 });
  const read = async (chunks: readonly Int32Array[]): Promise<Sample[]> => {
    using sequence = runner.openSequence();
    const samples: Sample[] = [];
    const started = performance.now();
    for (const chunk of chunks) {
      const before = performance.now();
      const position = sequence.length + chunk.length / 2;
      (await prefill(runner, sequence, chunk, { endsPrompt: false, signal })).dispose();
      await runner.stream.synchronize();
      samples.push({ position, secondsPerToken: (performance.now() - before) / 1000 / chunk.length });
      if (performance.now() - started > 1000 * longestTrial) break;
    }
    return samples;
  };
  const chunks = Array.from({ length: Math.ceil(beginning.length / runner.maxBatchRows) }, (_, index) =>
    beginning.subarray(index * runner.maxBatchRows, (index + 1) * runner.maxBatchRows),
  );
  // What a device does once, such as loading kernels, is no part of what a token costs.
  await read(chunks.slice(0, 1));
  return extrapolate(await read(chunks), document.length);
}

/** What a token at a position of a document cost. */
export interface Sample {
  readonly position: number;
  readonly secondsPerToken: number;
}

/** Seconds for a document of so many tokens, by the line of least squares through what tokens cost. */
export function extrapolate(samples: readonly Sample[], tokens: number): number {
  const position = mean(samples.map((sample) => sample.position));
  const cost = mean(samples.map((sample) => sample.secondsPerToken));
  const spread = mean(samples.map((sample) => (sample.position - position) ** 2));
  const together = mean(samples.map((sample) => (sample.position - position) * (sample.secondsPerToken - cost)));
  // A later token costs no less than an earlier one, whatever the noise says.
  const slope = spread > 0 ? Math.max(0, together / spread) : 0;
  return tokens * Math.max(0, cost + slope * (tokens / 2 - position));
}

function mean(values: readonly number[]): number {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}
