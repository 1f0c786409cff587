import * as core from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import * as model from './index.js';
import { needleModel } from './testing/paths.js';

describe('@kv/model by itself', () => {
  it('is enough to choose a device and a policy, and to tell errors apart', async () => {
    using opened = await model.Model.open(needleModel, { device: model.createDevice({ kind: 'cpu', threads: 1 }) });
    const policy = model.kvPolicy({ store: model.densePagedStore({ dtype: 'f32' }) });
    using runner = opened.createRunner({ policy, contextTokens: 64, maxBatchRows: 64 });
    expect(runner.policy.name).toBe('dense + dense f32');
    expect(() => opened.createRunner({ sequences: 0 })).toThrow(model.InvalidValueError);
  });

  it.each([
    ['a name', 'int4'],
    ['a store', model.densePagedStore()],
    ['a selector', { name: 'halo', observationWindow: 16, select: () => undefined }],
    ['nothing', null],
  ])('says how a policy is made to who gives %s for one', async (_what, given) => {
    using opened = await model.Model.open(needleModel, { device: model.createDevice({ kind: 'cpu', threads: 1 }) });
    const make = () => opened.createRunner({ policy: given as unknown as model.KvPolicy, contextTokens: 64 });
    expect(make).toThrow(model.InvalidValueError);
    expect(make).toThrow(/^createRunner: policy is .*; it must be a policy: createPolicy\(name\) of @kv\/policies, or kvPolicy\(/);
  });

  it('gives the very classes of @kv/sparse-core, all errors among them', () => {
    const errors = Object.keys(core).filter((name) => name.endsWith('Error'));
    expect(errors).toContain('KvError');
    for (const name of [...errors, 'createDevice', 'kvPolicy']) expect(model).toHaveProperty(name, core[name as 'KvError']);
  });
});
