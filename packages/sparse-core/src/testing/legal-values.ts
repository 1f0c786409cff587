/** What is right though it differs from the right call, and why. */
export interface LegalValue {
  /** Matches `path: wrong value`, or a pair of them, parted by a comma. */
  readonly what: RegExp;
  readonly why: string;
  /** Not tried everywhere: it needs a second kind of device, or is a pair that may not be drawn. */
  readonly seldom?: true | undefined;
}

/** Values in the places, of an operation's struct or a function's parameters, that one of the expressions matches. */
export const legalAt = (paths: string, values: string, why: string): LegalValue => ({
  what: new RegExp(`^(args\\.)?(${paths}): (${values})$`),
  why,
});

/** Two values that are right together, in either order. */
export const legalTogether = (paths: string, values: string, why: string): LegalValue => ({
  what: new RegExp(`^(${paths}): (${values}), (${paths}): (${values})$`),
  why,
  seldom: true,
});
/** What is of another kind of device than the rest: `cpu → cuda`. */
export const legalAcross = (paths: string, values: string, kinds: string, why: string): LegalValue => ({
  ...legalAt(paths, `${values} of another device \\(${kinds}\\)`, why),
  seldom: true,
});

export const optional = (paths: string) => legalAt(paths, 'undefined|absent', 'it has a default');
export const rowsApart = (paths: string) => legalAt(paths, 'gaps between rows', 'rows may lie apart');
export const anyFloat = (paths: string) => legalAt(paths, 'f16|bf16', 'any float dtype');
export const inPlace = (output: string, inputs: string) =>
  legalAt(output, `over args\\.(${inputs})`, 'it works in place');
export const freeAxis = (paths: string, axes: string) =>
  legalAt(paths, `(${axes}) = \\d+`, 'no other tensor has this axis');
export const anyFinite = (paths: string) => legalAt(paths, '-?[\\d.]+', 'any finite f32');
export const anyPositive = (paths: string) => legalAt(paths, '0\\.5|\\d{10,16}', 'any positive f32');
export const aProxiedSignal = (paths: string): LegalValue => ({
  ...legalAt(paths, 'a proxy', 'some versions of Node let a proxy of a signal be asked'),
  seldom: true,
});
