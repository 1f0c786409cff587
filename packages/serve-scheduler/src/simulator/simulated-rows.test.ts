import { expect, it } from 'vitest';

import { measured, reference } from '../testing/measured-rows.js';
import { simulate } from './simulate.js';
import { simulatedModels, systems } from './systems.js';
import { poissonTrace } from './trace.js';

/** When it fails, tables or the simulator have changed since the rows were made: tools/bench/README.md says how to make them again. */
it('has rows that today\'s tables and simulator give', async () => {
  const [model, rate] = [simulatedModels['llama3-8b'], 2];
  const served = async (features: (typeof systems)['base' | '+LP']) => await simulate({ model, features, trace: poissonTrace(100, rate, model, 1, 512), seed: 1 });
  const [base, all] = [await served(systems.base), await served(systems['+LP'])];
  for (const [what, of] of [['mean time to the first token', 'firstToken'], ['mean time between tokens', 'betweenTokens'], ['tokens', 'tokensPerSecond']] as const) {
    const row = ['serving-simulated.json', `H200, llama3-8b, ${rate} requests/s: ${what}`] as const;
    expect([all[of] / measured(...row), base[of] / reference(...row)].map((share) => Number(share.toFixed(5))), what).toEqual([1, 1]);
  }
});
