import type { Logits, Runner } from '@kv/model';
import { sample } from '@kv/sparse-core';

/** The token of the greatest logit of each row; of equal ones the lowest. */
export async function likeliestTokens({ stream }: Runner, logits: Logits): Promise<Int32Array> {
  const [rows] = logits.shape;
  using output = stream.device.tensor('i32', ['row'], [rows]);
  const settings = Array.from({ length: rows }, () => ({ temperature: 0 }));
  const steps = Array.from({ length: rows }, () => 0);
  sample(stream, { logits, settings, steps, output });
  return await output.read();
}
