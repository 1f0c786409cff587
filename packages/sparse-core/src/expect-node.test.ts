import { describe, expect, it } from 'vitest';

import { CapabilityError } from './errors.js';
import { expectNode } from './expect-node.js';

describe('expectNode', () => {
  it.each(['18.20.8', '20.18.3', '0.12.18', '9.9.9'])('refuses Node %s in one line', (version) => {
    expect(() => expectNode(version)).toThrow(CapabilityError);
    expect(() => expectNode(version)).toThrow(`Node ${version} is too old for @kv; install Node 20.19 or newer.`);
  });

  it.each(['20.19.0', '20.20.2', '21.0.0', '24.1.0', '100.0.0-nightly'])('takes Node %s', (version) => {
    expect(() => expectNode(version)).not.toThrow();
  });
});
