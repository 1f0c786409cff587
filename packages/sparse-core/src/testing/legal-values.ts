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
/** Of a batch of two entries: fewer or more of them, none of which has rows. */
export const otherEntries = [
  legalTogether('args\\.(slots|queryStart)', 'batch = 1|boundary = 2', 'one entry without rows'),
  legalTogether('args\\.(slots|queryStart)', 'batch = 3|boundary = 4', 'three entries without rows'),
];

/** An operation whose only tensor is of the stream's device, though of another than the right call's. */
export const bothElsewhere = (path: string) =>
  legalTogether(`stream|args\\.${path}`, 'a (stream|tensor) of another device \\(\\w+ → \\w+\\)', 'both are of the other device');

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
