import { InvalidArgumentError, Option } from 'commander';

/** A commander parser of whole numbers from `least` on. */
export function wholeNumber(least: number): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (text.trim() !== '' && Number.isSafeInteger(value) && value >= least) return value;
    throw new InvalidArgumentError(`It must be a whole number, at least ${least}.`);
  };
}

/** The same of several values of one option. */
export function wholeNumbers(least: number): (text: string, before: readonly number[] | undefined) => number[] {
  const parse = wholeNumber(least);
  const given = new WeakSet<readonly number[]>();
  return (text, before) => {
    // The values before the first one are the default.
    const all = [...(before !== undefined && given.has(before) ? before : []), parse(text)];
    given.add(all);
    return all;
  };
}

/** A commander parser of finite numbers; what range makes sense the option's user says. */
export function finiteNumber(text: string): number {
  const value = Number(text);
  if (text.trim() !== '' && Number.isFinite(value)) return value;
  throw new InvalidArgumentError('It must be a number.');
}

/** Where a model runs, as every command that runs one takes it. */
export interface DeviceChoice {
  readonly device: string;
  readonly threads?: number | undefined;
}

export function deviceOptions(): Option[] {
  return [
    new Option('--device <kind>', 'where the model runs: cpu, or cuda where the build and the machine have it').default('cpu'),
    new Option('--threads <count>', 'threads that compute (default: one for each core)').argParser(
      wholeNumber(1),
    ),
  ];
}
