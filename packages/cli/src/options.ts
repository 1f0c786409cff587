import { InvalidArgumentError, Option } from 'commander';

/** A commander parser of whole numbers from `least` to `most`. */
export function wholeNumber(least: number, most = Number.MAX_SAFE_INTEGER): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (text.trim() !== '' && Number.isSafeInteger(value) && value >= least && value <= most) return value;
    const limit = most === Number.MAX_SAFE_INTEGER ? '' : ` and at most ${most}`;
    throw new InvalidArgumentError(`It must be a whole number, at least ${least}${limit}.`);
  };
}

/** The same of several values of one option. */
export function wholeNumbers(least: number, most?: number): (text: string, before: readonly number[] | undefined) => number[] {
  const parse = wholeNumber(least, most);
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

/** A commander parser of texts that say something. */
export function someText(text: string): string {
  if (text !== '') return text;
  throw new InvalidArgumentError('It must be a text of at least one character.');
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
