// Steps of several long sequences, with all that they read on the device and with some of it missing; resuming; forks.
import { twoMemories } from './serving-rows.mjs';
import { readPrompts, timeSteps } from './step-times.mjs';

const mean = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;

/** Hits and misses of all steps so far. The device is asked behind them, with a step more. */
async function counts(runner, sequences) {
  const ask = () => sequences.map((sequence) => runner.demand(sequence));
  ask();
  await timeSteps(runner, sequences, 1, { warmUp: 0, repeats: true });
  return ask().reduce((sum, { hits, misses }) => ({ hits: sum.hits + hits, misses: sum.misses + misses }), { hits: 0, misses: 0 });
}

/** Times of steps, and which share of what they read was missing, in %. Two steps more are counted, in front of them: nothing is missing there. */
async function countedSteps(runner, sequences, steps, before) {
  const first = await counts(runner, sequences);
  const times = await timeSteps(runner, sequences, steps, { warmUp: 1, before, repeats: true });
  const last = await counts(runner, sequences);
  const [hits, misses] = [last.hits - first.hits, last.misses - first.misses];
  return { times, missing: (100 * misses * (steps + 2)) / ((hits + misses) * steps) };
}

/** Milliseconds from here until the stream has nothing left to do. */
async function timed(runner, work) {
  await runner.stream.synchronize();
  const started = performance.now();
  await work();
  await runner.stream.synchronize();
  return performance.now() - started;
}

/**
 * With random weights and positions a step reads other blocks than the one before. Here positions turn nothing: steps that are
 * fed the same tokens read the same blocks. All of them are on the device, until a sequence loses its own.
 */
export async function steps({ model, sizes, row }) {
  const { prompt, sequences: count, rows: maxBatchRows, rounds, steps: stepCount, warm } = sizes;
  const contextTokens = prompt + warm + (rounds + 1) * (4 * stepCount + 40) + 200;
  const lengths = Array(count).fill(prompt);
  const rope = { convention: 'halfSplit', inverseFrequencies: new Float32Array(model.config.headDim / 2), attentionScale: 1 };
  const open = async (policy) => {
    const runner = model.createRunner({ policy, rope, sequences: count + 1, contextTokens, cacheTokens: (count + 1) * contextTokens, maxBatchRows });
    const sequences = lengths.map(() => runner.openSequence());
    return { runner, sequences, reading: await readPrompts(runner, sequences, lengths) };
  };
  // As `offload-1/4` has it: a step reads a sixteenth.
  const cachedShare = 1 / 4;
  const two = await twoMemories(model, { sequences: count + 1, contextTokens, maxBatchRows, share: cachedShare });
  const dense = await open(undefined);
  const split = await open(two.policy);
  console.error(`prompts read in ${dense.reading.map(Math.round)} ms, saved in ${split.reading.map(Math.round)} ms`);
  const { runner, sequences } = split;
  const repeats = true;
  await timeSteps(runner, sequences, warm, { repeats });
  const samples = { dense: [], resident: [], missing: [] };
  const shares = { resident: [], missing: [] };
  const measured = async (name, before) => {
    const { times, missing } = await countedSteps(runner, sequences, stepCount, before);
    console.error(`${name}: ${mean(times).toFixed(2)} ms, ${missing.toFixed(3)} % missing`);
    samples[name].push(...times);
    shares[name].push(missing);
  };
  const timeDense = async () => samples.dense.push(...(await timeSteps(dense.runner, dense.sequences, stepCount, { repeats })));
  for (let round = 0; round < rounds; round += 1) {
    await timeDense();
    await measured('resident');
  }
  // A sequence that has lost all misses most of its blocks in that step, and some in later ones, more the longer this goes on: the
  // first round is not counted.
  const loseAll = (step) => step % 9 % 4 === 0 && step % 9 < 8 && runner.evict(sequences[(2 * Math.floor(step / 9) + (step % 9) / 4) % count]);
  await countedSteps(runner, sequences, stepCount, loseAll);
  for (let round = 0; round < rounds; round += 1) {
    await timeDense();
    await measured('missing', loseAll);
  }
  // Means of nine steps.
  const nines = samples.missing.flatMap((_, step, all) => (step % 9 === 8 ? [mean(all.slice(step - 8, step + 1))] : []));
  const reference = { name: 'ours, dense cache', samples: samples.dense };
  const what = `step of ${count} sequences of ${prompt} tokens`;
  row({ measure: `${what}, all that it reads on the device`, samples: samples.resident, reference, target: { ratio: 1.8 }, missing: mean(shares.resident), cachedShare });
  row({ measure: `${what}, some of what it reads missing: in two of nine steps one has lost all; the device has room for a quarter of the blocks`, samples: nines, reference, target: { ratio: 1.4 }, missing: mean(shares.missing), cachedShare });

  const [only] = sequences;
  const alone = await timeSteps(runner, [only], stepCount, { repeats });
  const times = { thread: [], evict: [], resume: [] };
  for (let round = 0; round < 8; round += 1) {
    const evicted = await timed(runner, () => {
      const started = performance.now();
      runner.evict(only);
      times.thread.push(performance.now() - started);
    });
    times.evict.push(evicted);
    times.resume.push(await timed(runner, () => timeSteps(runner, [only], 1, { warmUp: 0, repeats })));
  }
  const again = { name: 'its prompt read again', samples: dense.reading };
  row({ measure: `the step that resumes a sequence of ${prompt} tokens`, samples: times.resume, reference: again, target: { atMost: 20 }, stepMilliseconds: mean(alone) });
  row({ measure: `a sequence of ${prompt} tokens leaves the device`, samples: times.evict, threadMilliseconds: mean(times.thread), chart: false });

  const forks = { dense: [], split: [] };
  for (let round = 0; round < 8; round += 1) {
    for (const [name, each] of Object.entries({ dense, split })) {
      const started = performance.now();
      const fork = each.runner.fork(each.sequences[0]);
      await each.runner.stream.synchronize();
      if (round > 0) forks[name].push(performance.now() - started);
      fork.dispose();
      await each.runner.stream.synchronize();
    }
  }
  row({ measure: `fork of a sequence of ${prompt} tokens`, samples: forks.split, reference: { name: 'ours, dense cache', samples: forks.dense }, target: { atMost: 5 } });
  for (const each of [dense, split]) each.runner.dispose();
  two.close();
}
