import { CapabilityError, InvalidValueError, kvPolicy } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { createPolicy, type NamedPolicy, policies, policyOf } from './policies.js';

const isPlain = ({ reading }: NamedPolicy) => 'parts' in reading;

describe('createPolicy', () => {
  const dense = kvPolicy({});

  it.each(policies.filter(isPlain).map((policy) => policy.name))('makes %s of its reading and its selection', (name) => {
    const { reading, select } = policyOf(name);
    const { prefill = dense.prefill, store = dense.store } = 'parts' in reading ? reading.parts() : {};
    const made = createPolicy(name);
    expect([made.prefill.name, made.store.name, made.select?.name]).toEqual([prefill.name, store.name, select?.().name]);
  });

  it.each(policies.filter((policy) => !isPlain(policy)).map((policy) => policy.name))('says how %s is made', (name) => {
    expect(() => createPolicy(name)).toThrow(CapabilityError);
    expect(() => createPolicy(name)).toThrow(`openPolicy('${name}', model, cache)`);
  });

  it('refuses a name that there is not, and says which there are', () => {
    const refused = (): unknown => createPolicy('magic');
    expect(refused).toThrow(InvalidValueError);
    expect(refused).toThrow(/'magic'.*dense, hbw-1\/4/);
  });
});

describe('policies', () => {
  it('have names of their own, the reference first', () => {
    const names = policies.map(({ name }) => name);
    expect(new Set(names).size).toBe(names.length);
    expect(names[0]).toBe('dense');
  });
});
