import { attentionRow, describeOnDevices } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import { streamingPrefill } from './streaming-prefill.js';
import { Layer, rowsOfHeads, scale, syntheticPrompt } from './testing/prompt-layer.js';

describeOnDevices('streamingPrefill', ({ open }) => {
  it('computes the blocks of the sinks and of the window of each tile', async () => {
    const prompt = syntheticPrompt(4, 1500);
    const device = open();
    const reading = new Layer(device, device.createStream(), streamingPrefill({ windowTokens: 200, denseLastRows: 0 }));
    const { output, reports } = await reading.read(prompt, [1000, 1500]);
    const [queries, keys, values] = [rowsOfHeads(prompt.query, 4), rowsOfHeads(prompt.keys, 2), rowsOfHeads(prompt.values, 2)];
    for (const row of [0, 127, 128, 640, 999, 1000, 1211, 1499]) {
      // Tiles are counted from a step's first row, and a tile takes what any of its rows does.
      const start = row < 1000 ? 0 : 1000;
      const first = start + Math.floor((row - start) / 128) * 128;
      const taken = Array.from({ length: row + 1 }, (_, key) => key).filter((key) => {
        const block = Math.floor(key / 64);
        return block === 0 || (block + 1) * 64 > first - 200 + 1;
      });
      const wanted = attentionRow(
        queries[3]?.[row] ?? new Float64Array(),
        taken.length,
        scale,
        (index) => keys[1]?.[taken[index] ?? NaN] ?? new Float64Array(),
        (index) => values[1]?.[taken[index] ?? NaN] ?? new Float64Array(),
      );
      const given = output.subarray((row * 4 + 3) * 32, (row * 4 + 4) * 32);
      const apart = Math.max(...wanted.output.map((x, d) => Math.abs(x - (given[d] ?? NaN))));
      expect(apart, `row ${row}, ${taken.length} keys`).toBeLessThanOrEqual(wanted.outputError);
    }
    expect(reports.map(({ fallback }) => fallback)).toEqual([undefined, undefined]);
    expect(reports[1]?.density).toBeLessThan(0.5);
  });
});
