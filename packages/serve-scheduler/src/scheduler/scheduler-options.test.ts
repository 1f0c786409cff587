import { InvalidValueError, OutOfMemoryError } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { Scheduler } from './scheduler.js';
import type { SchedulerOptions } from './scheduler-options.js';

const model = { layers: 4, kvHeads: 2, headDim: 64, hiddenSize: 256 };
const options: SchedulerOptions = { model, deviceBlocks: 1000, hostBlocks: 4000 };

describe('options', () => {
  it('have the defaults of the paper', () => {
    const { settings } = new Scheduler(options);
    expect(settings).toMatchObject({ blockTokens: 32, budgetTokens: 2048, maxBatchTokens: 2080, maxInjectTokens: 2048 * 4 });
    expect(settings.features).toEqual({ sparse: true, offload: true, workingSetControl: true, layerSegments: true });
  });

  it.each([
    ['deviceBlocks', { deviceBlocks: 0 }],
    ['hostBlocks', { hostBlocks: undefined }],
    ['hostBlocks', { hostBlocks: 1.5 }],
    ['maxRequests', { maxRequests: '3' as never }],
    ['maxBatchTokens', { maxRequests: 8, chunkTokens: 64, maxBatchTokens: 71 }],
    ['maxInjectTokens', { maxInjectTokens: 511 }],
    ['maxInjectTokens', { maxInjectTokens: 2047, features: { layerSegments: false } }],
    ['budgetTokens', { budgetTokens: 223 }],
    ['layers', { model: { ...model, layers: NaN } }],
    ['model', { model: undefined as never }],
    ['features', { features: 1 as never }],
    ['sparse', { features: { sparse: 'yes' as never } }],
    ['offload', { features: { sparse: false, offload: true } }],
    ['workingSetControl', { features: { offload: false, workingSetControl: true } }],
  ])('refuses %s: %o', (subject, changes: Partial<SchedulerOptions>) => {
    const make = () => new Scheduler({ ...options, ...changes });
    expect(make).toThrow(InvalidValueError);
    expect(make).toThrow(expect.objectContaining({ subject }));
  });

  it('refuses a device without room for the smallest budget', () => {
    // A block to choose of each head.
    expect(() => new Scheduler({ ...options, deviceBlocks: 1 })).toThrow(OutOfMemoryError);
    expect(() => new Scheduler({ ...options, deviceBlocks: 2 })).not.toThrow();
  });
});

describe('requests', () => {
  it.each([
    [InvalidValueError, 'promptTokens', { promptTokens: 0, maxTokens: 1 }],
    [InvalidValueError, 'maxTokens', { promptTokens: 1, maxTokens: NaN }],
    [InvalidValueError, 'size', null as never],
    [OutOfMemoryError, 'hostBlocks', { promptTokens: 32, maxTokens: 64_000 }],
    [OutOfMemoryError, 'deviceBlocks', { promptTokens: 48_000, maxTokens: 1 }],
  ])('that can never be served are refused with an %o of %s', (kind, subject, size) => {
    const scheduler = new Scheduler(options);
    expect(() => scheduler.submit(size)).toThrow(kind);
    expect(() => scheduler.submit(size)).toThrow(expect.objectContaining({ subject }));
    expect(scheduler.waiting).toBe(0);
  });

  it('of another scheduler are refused', () => {
    const request = new Scheduler(options).submit({ promptTokens: 1, maxTokens: 1 });
    const scheduler = new Scheduler(options);
    for (const given of [request, {} as never, undefined as never]) {
      expect(() => scheduler.end(given)).toThrow(InvalidValueError);
      expect(() => scheduler.observe(given, 1)).toThrow(InvalidValueError);
    }
    expect(() => scheduler.observe(scheduler.submit(request), -1)).toThrow(InvalidValueError);
  });
});
