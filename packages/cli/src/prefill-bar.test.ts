import { PassThrough } from 'node:stream';
import { text } from 'node:stream/consumers';

import { afterEach, beforeEach, describe, expect, it } from 'vitest';

import { PrefillBar } from './prefill-bar.js';
import { TextOutput } from './text-output.js';

describe('PrefillBar', () => {
  const clock = performance.now.bind(performance);
  let milliseconds = 0;
  beforeEach(() => {
    milliseconds = 0;
    performance.now = () => milliseconds;
  });
  afterEach(() => {
    performance.now = clock;
  });

  /** What is written of these states, each said this many milliseconds after the one before. */
  async function lines(states: readonly (readonly [tokens: number, wait: number])[]): Promise<string[]> {
    const stream = new PassThrough();
    const bar = new PrefillBar(new TextOutput(stream), 'dense');
    for (const [tokens, wait] of states) {
      milliseconds += wait;
      bar.update(tokens, 1500);
    }
    bar.dispose();
    bar.dispose();
    stream.end();
    return (await text(stream)).split('\n');
  }

  it('writes a line once where nothing can be redrawn', async () => {
    expect(await lines([[1500, 0]])).toEqual(['dense: 1,500/1,500 tokens (100%), 0 ms', '']);
  });

  it('writes the first state, the last one, and others after five seconds', async () => {
    const states = [[500, 0], [600, 2000], [700, 3000], [800, 4000], [1500, 500]] as const;
    expect(await lines(states)).toEqual([
      'dense: 500/1,500 tokens (33%), 0 ms',
      'dense: 700/1,500 tokens (46%), 5.00 s',
      'dense: 1,500/1,500 tokens (100%), 9.50 s',
      '',
    ]);
  });

  it('counts the time before the first state too', async () => {
    expect(await lines([[1500, 700]])).toEqual(['dense: 1,500/1,500 tokens (100%), 700 ms', '']);
  });

  it('writes nothing when nothing was read', async () => {
    expect(await lines([])).toEqual(['']);
  });

  it('draws a bar on a terminal, and ends it', async () => {
    const stream = Object.assign(new PassThrough(), { isTTY: true, columns: 80 });
    const bar = new PrefillBar(new TextOutput(stream), 'dense');
    bar.update(500, 1500);
    bar.update(1500, 1500);
    bar.dispose();
    stream.end();
    const written = await text(stream);
    expect(written).toContain('33% | 500/1,500 tokens');
    expect(written).toContain('100% | 1,500/1,500 tokens');
    expect(written.endsWith('\n')).toBe(true);
  });
});
