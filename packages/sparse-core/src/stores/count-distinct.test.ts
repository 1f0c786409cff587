import { expect, it } from 'vitest';

import { countDistinct } from './count-distinct.js';

it('counts what several lists name once', () => {
  expect(countDistinct([Int32Array.of(5, 0, 9), Int32Array.of(), Int32Array.of(9, 1, 0)])).toBe(4);
});

it('finds none where there is none', () => {
  expect(countDistinct([])).toBe(0);
  expect(countDistinct([new Int32Array()])).toBe(0);
});
