import { InvalidValueError } from '@kv/sparse-core';

/** @throws InvalidValueError unless `given` is a whole number from `least` to `most` */
export function expectWholeNumber(name: string, given: number, least: number, most: number): void {
  if (Number.isInteger(given) && given >= least && given <= most) return;
  const shown = typeof given === 'number' ? given : typeof given;
  throw new InvalidValueError(`${name}: given ${shown}, wanted a whole number from ${least} to ${most}.`, {
    subject: name,
    given,
    wanted: [least, most],
  });
}
