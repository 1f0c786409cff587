import { InvalidArgumentError, Option } from 'commander';

/** A commander parser of whole numbers from `least` on. */
export function wholeNumber(least: number): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (text.trim() !== '' && Number.isSafeInteger(value) && value >= least) return value;
    throw new InvalidArgumentError(`It must be a whole number, at least ${least}.`);
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
    new Option('--device <kind>', 'where the model runs').default('cpu'),
    new Option('--threads <count>', 'threads that compute (default: one for each core)').argParser(
      wholeNumber(1),
    ),
  ];
}
