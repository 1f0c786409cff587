import { withDirectory } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import { largestDifference } from '../testing/golden.js';
import { randomModel } from '../testing/random-model.js';
import { referenceLogits } from '../testing/reference-model.js';
import { allLogits, withRunner } from '../testing/run-model.js';

const small = { num_hidden_layers: 2, max_position_embeddings: 512 };
const llama3 = { factor: 4, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 32 };

/** What the reference models of the repository do not have. */
const cases: [string, object, number][] = [
  [
    'odd sizes and one kv head',
    {
      model_type: 'llama',
      vocab_size: 131,
      hidden_size: 37,
      intermediate_size: 53,
      num_attention_heads: 5,
      num_key_value_heads: 1,
      head_dim: 10,
    },
    1,
  ],
  [
    'every bias of Llama, linear RoPE scaling, 17 shards',
    {
      model_type: 'llama',
      vocab_size: 97,
      hidden_size: 48,
      intermediate_size: 40,
      num_attention_heads: 4,
      num_key_value_heads: 2,
      attention_bias: true,
      mlp_bias: true,
      rope_scaling: { type: 'linear', factor: 3 },
    },
    17,
  ],
  [
    'biases of Qwen3, Llama 3 scaling, heads of 80, a tied head',
    {
      model_type: 'qwen3',
      vocab_size: 61,
      hidden_size: 40,
      intermediate_size: 24,
      num_attention_heads: 2,
      num_key_value_heads: 2,
      head_dim: 80,
      attention_bias: true,
      tie_word_embeddings: true,
      rope_scaling: { ...llama3, rope_type: 'llama3' },
    },
    2,
  ],
];

describe('a random model with', () => {
  it.each(cases)('%s computes what the equations say', async (_name, json, shards) => {
    const model = randomModel({ ...small, ...json }, shards);
    const ids = Int32Array.from(
      { length: 90 },
      (_, index) => (index * 37 + 11) % model.config.vocabularySize,
    );
    const wanted = referenceLogits(model, ids).flatMap((row) => [...row]);
    const logits = await withDirectory(model.files, (directory) =>
      withRunner(directory, { contextTokens: 128 }, async (runner) => {
        using sequence = runner.openSequence();
        return await allLogits(runner, sequence, ids, 33);
      }),
    );
    // f32 rounds at 6e-8; sums of up to 160 terms through 2 layers may lose two to three digits of that.
    const largest = Math.max(...wanted.map(Math.abs));
    expect(largest).toBeGreaterThan(1);
    expect(largestDifference(logits, wanted)).toBeLessThan(2e-5 * largest);
  });
});
