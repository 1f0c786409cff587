import { InvalidValueError, kvPolicy } from '@kv/sparse-core';
import type { KvPolicy } from '@kv/sparse-core';

/** A policy under the name that `--policy` and the rows of `kv compare` use. */
export interface NamedPolicy {
  readonly name: string;
  readonly create: () => KvPolicy;
}

/** The reference: full attention, and a cache that keeps every token. */
export const dense: NamedPolicy = { name: 'dense', create: () => kvPolicy() };

/** Every policy that the command knows, in the order of the rows. */
export const policies: readonly NamedPolicy[] = [dense];

/** @throws InvalidValueError when there is no such policy */
export function findPolicy(name: string): NamedPolicy {
  const policy = policies.find((each) => each.name === name);
  if (policy !== undefined) return policy;
  const names = policies.map((each) => each.name);
  throw new InvalidValueError(`There is no policy '${name}'; use one of ${names.join(', ')}.`, {
    subject: 'policy',
    given: name,
    wanted: names,
  });
}
