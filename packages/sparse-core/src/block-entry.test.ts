import { describe, expect, it } from 'vitest';
import { blockEntry, blockNumber, isDense, mostBlocks, noBlock } from './block-entry.js';

describe('entries of block tables', () => {
  it.each(['dense', 'sparse24'] as const)('keep the number of a block and whether it is %s', (kind) => {
    for (const number of [0, 1, 12_345, mostBlocks(kind) - 1]) {
      const entry = blockEntry(kind, number);
      expect(Int32Array.of(entry)[0]).toBe(entry);
      expect(isDense(entry)).toBe(kind === 'dense');
      expect(blockNumber(entry)).toBe(number);
    }
  });

  it('are the numbers of dense blocks, and others for blocks of other kinds', () => {
    expect(blockEntry('dense', 7)).toBe(7);
    const last = mostBlocks('sparse24') - 1;
    const entries = [blockEntry('sparse24', 0), blockEntry('sparse24', last), noBlock];
    expect(new Set(entries).size).toBe(3);
    expect(entries.some(isDense)).toBe(false);
  });
});
