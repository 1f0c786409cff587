import { writeFileSync } from 'node:fs';
import { mkdtemp } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect } from 'vitest';
import { createDevice, devices } from '../device.js';
import { type ElementArray } from '../dtype.js';
import { KvError } from '../errors.js';
import type { Device, Stream, Tensor } from '../handles.js';
import { TensorObject } from '../tensor.js';
import type { LegalValue } from './legal-values.js';
import { liveBytes } from './live-bytes.js';
import { Random } from './random.js';
import { type WrongSources, type WrongValue, wrongValues } from './wrong-values.js';

/** A function, and one right call of it. */
export interface MisusedFunction {
  readonly name: string;
  /** Its arguments by any names, made anew in every call; of a method, `self` is what it is called on. */
  readonly args: (device: Device, stream: Stream) => Readonly<Record<string, unknown>>;
  readonly call: (args: never) => unknown;
  /** Paths of arguments that outlive the call: they are not disposed of. */
  readonly lasting?: readonly string[] | undefined;
  /** Paths of the tensors that it writes. */
  readonly outputs?: readonly string[] | undefined;
  /**
   * What is right though it differs, and why: every try whose `path: wrong value` the expression matches may also be
   * accepted, and one at least is, unless it is seldom tried.
   */
  readonly legal?: readonly LegalValue[] | undefined;
}

/** An operation, whose arguments are a stream and a struct. */
export function misusedOperation(
  operation: (stream: Stream, args: never) => void,
  args: (device: Device) => object,
  { outputs = [], legal }: Pick<MisusedFunction, 'outputs' | 'legal'>,
): MisusedFunction {
  return {
    name: operation.name,
    args: (device, stream) => ({ stream, args: args(device) }),
    call: (given: { stream: Stream; args: never }) => operation(given.stream, given.args),
    outputs: outputs.map((path) => `args.${path}`),
    legal,
  };
}

/** Counts of tries by what came of them. */
class MisuseCounts {
  tries = 0;
  atTheCall = 0;
  whenRun = 0;
  legal = 0;

  toString(): string {
    const { tries, atTheCall, whenRun, legal } = this;
    const [all, refused, failed, right] = [tries, atTheCall, whenRun, legal].map((count) => count.toLocaleString('en-US'));
    return `${all ?? ''} tries: ${refused ?? ''} refused at the call, ${failed ?? ''} when run, ${right ?? ''} legal`;
  }
}

interface Place {
  readonly path: string;
  readonly value: unknown;
}

/** A wrong value in its place. */
interface Try {
  readonly path: string;
  readonly wrong: WrongValue;
}

/** Tries of two wrong values at once; 500 of each function, more with `KV_MISUSE=20000`. */
const pairs = Number(process.env.KV_MISUSE ?? 500);

const isContainer = (value: unknown): value is Record<string, unknown> =>
  typeof value === 'object' && value !== null && (Array.isArray(value) || Object.getPrototypeOf(value) === Object.prototype);

/** Every argument, field and entry, the containers included. */
function placesOf(value: unknown, path: string): Place[] {
  const fields = isContainer(value) ? Object.entries(value) : [];
  const behind = fields.flatMap(([name, field]) => placesOf(field, path === '' ? name : `${path}.${name}`));
  return path === '' ? behind : [{ path, value }, ...behind];
}

/** The arguments with another value in one place; `absent` takes the field away. */
function replaced(value: unknown, path: readonly string[], wrong: WrongValue): unknown {
  const [field, ...rest] = path;
  if (field === undefined) return wrong.of === undefined ? wrong.value : wrong.of(value);
  const entries = Object.entries(value as object).map(([name, held]: [string, unknown]): [string, unknown] => [
    name,
    name === field ? replaced(held, rest, wrong) : held,
  ]);
  const left = entries.filter(([, held]) => held !== absent);
  return Array.isArray(value) ? left.map(([, held]) => held) : Object.fromEntries(left);
}

const absent = Symbol('absent');

/** Neither lies in the other's place, nor are they one change of two tensors, which may be right together. */
function areIndependent(one: Try, other: Try): boolean {
  return one.wrong.name !== other.wrong.name && !other.path.startsWith(one.path) && !one.path.startsWith(other.path);
}

/** Tensors of the arguments that an output could lie over: all the others. */
function overlapping(places: readonly Place[], outputs: readonly string[], device: Device): { tries: [Try, Try][]; owned: Tensor[] } {
  const tensors = places.filter((place): place is { path: string; value: Tensor } => TensorObject.is(place.value));
  const owned: Tensor[] = [];
  const tries = tensors
    .filter(({ path }) => outputs.includes(path))
    .flatMap((output) =>
      tensors.filter(({ path }) => path !== output.path).flatMap((other) =>
        [0, 4].map((shift): [Try, Try] => {
          const bytes = Math.max(output.value.byteLength + shift, other.value.byteLength) + 16;
          const memory = device.tensor('u8', ['byte'], [bytes], new Uint8Array(bytes));
          owned.push(memory);
          const over = ({ dtype, axes, shape, strides }: Tensor, offset: number) => memory.derive(dtype, axes, shape, strides, offset);
          return [
            { path: output.path, wrong: { name: `over ${other.path}${shift === 0 ? '' : ', shifted'}`, value: over(output.value, shift) } },
            { path: other.path, wrong: { name: '', value: over(other.value, 0) } },
          ];
        }),
      ),
    );
  return { tries, owned };
}

/** The misuse of many functions on one device, on which nothing else lives. */
export class MisuseSuite {
  readonly counts = new MisuseCounts();
  readonly #device: Device;
  readonly #others: readonly Device[];

  constructor(device: Device) {
    this.#device = device;
    this.#others = devices().map((kind) => createDevice({ kind, threads: 1 }));
  }

  /** Tries every wrong value in every place, and some pairs of them. */
  async misuse(subject: MisusedFunction): Promise<void> {
    const device = this.#device;
    await device.defaultStream.synchronize();
    const before = device.memory().live;
    const wanted = await this.#rightCall(subject);
    const run = new MisuseRun(subject, device, this.counts);
    const sources: WrongSources = { device, stream: device.createStream(), others: this.#others, file: await device.mapFile(await zeroFile()) };
    const places = placesOf(run.args, '');
    // A method has to be called on something that has it.
    const tries = places.filter(({ path }) => path !== 'self').flatMap(({ path, value }) => [
      ...(/\.\d+$/.test(path) ? [] : [{ path, wrong: { name: 'absent', value: absent } }]),
      ...(/^(options|parts)$/.test(path) && isContainer(value) ? [{ path, wrong: { name: 'a name more', value: { ...value, optoin: 1 } } }] : []),
      ...wrongValues(value, sources, subject.outputs?.includes(path)).map((wrong): Try => ({ path, wrong })),
    ]);
    const shared = overlapping(places, subject.outputs ?? [], device);
    const made = [...tries.flatMap(({ wrong }) => wrong.owned ?? []), ...shared.owned, sources.stream, sources.file];
    try {
      for (const one of tries) await run.attempt([one]);
      for (const both of shared.tries) await run.attempt(both);
      const random = new Random(17);
      for (let pair = 0; pair < pairs && tries.length > 1; pair++) {
        const [one, other] = [random.pick(tries), random.pick(tries)];
        if (areIndependent(one, other)) await run.attempt([one, other]);
      }
      run.expectOnlyLegal();
      await run.expectUnchanged();
    } finally {
      // Whatever failed, the next function finds the device as this one did.
      disposeAll({ made });
      run.dispose();
    }
    expect(await this.#rightCall(subject), `${subject.name} after all that was wrong`).toEqual(wanted);
    // Streams let go of what they hold when they are closed, in the background.
    expect((await liveBytes(device, before)) - before, `bytes that ${subject.name} left`).toBe(0);
  }

  /** What all tensors of a right call hold behind it. */
  async #rightCall(subject: MisusedFunction): Promise<Record<string, ElementArray>> {
    const stream = this.#device.createStream();
    const args = subject.args(this.#device, stream);
    const result: unknown = await subject.call(args as never);
    await stream.synchronize();
    const held = await contentsOf(args, stream);
    disposeAll({ args, result, stream }, subject.lasting);
    return held;
  }
}

/** The tries of one function. */
class MisuseRun {
  readonly #subject: MisusedFunction;
  readonly #device: Device;
  readonly #counts: MisuseCounts;
  readonly #seen = new Set<RegExp>();
  /** What was taken for right and is not. */
  readonly #wrong: string[] = [];
  #stream: Stream;
  args: Readonly<Record<string, unknown>>;

  constructor(subject: MisusedFunction, device: Device, counts: MisuseCounts) {
    this.#subject = subject;
    this.#device = device;
    this.#counts = counts;
    this.#stream = device.createStream();
    this.args = subject.args(device, this.#stream);
  }

  async attempt(tries: readonly Try[]): Promise<void> {
    const { call } = this.#subject;
    const what = tries.filter(({ wrong }) => wrong.name !== '').map(({ path, wrong }) => `${path}: ${wrong.name}`);
    const args = tries.reduce((given: unknown, { path, wrong }) => replaced(given, path.split('.'), wrong), this.args);
    this.#counts.tries += 1;
    let called = false;
    try {
      const result = call(args as never);
      called = true;
      disposeAll({ result: await result });
      await this.#stream.synchronize();
    } catch (error) {
      if (!(error instanceof KvError)) throw new Error(`${this.#subject.name} with ${what.join(', ')}: no KvError`, { cause: error });
      if (called) this.#counts.whenRun += 1;
      else this.#counts.atTheCall += 1;
      if (called) this.#renew();
      return;
    }
    const ruleOf = (tried: string) => this.#subject.legal?.find((rule) => rule.what.test(tried));
    const together = ruleOf(what.join(', '));
    const legal = together === undefined ? what.map(ruleOf) : [together];
    if (legal.includes(undefined)) this.#wrong.push(what.join(', '));
    for (const rule of legal) if (rule !== undefined) this.#seen.add(rule.what);
    this.#counts.legal += 1;
    this.#renew();
  }

  /** A rule that nothing needs hides what it would allow one day. */
  expectOnlyLegal(): void {
    expect(this.#wrong, `what ${this.#subject.name} took for right: ${this.#wrong.join('; ')}`).toEqual([]);
    const unseen = (this.#subject.legal ?? []).filter(({ what, seldom }) => !seldom && !this.#seen.has(what));
    expect(unseen, `${this.#subject.name}: legal, and never accepted`).toEqual([]);
  }

  /** What only refused calls were given is as it was. */
  async expectUnchanged(): Promise<void> {
    const held = await contentsOf(this.args, this.#stream);
    this.#renew();
    expect(held, `what refused calls of ${this.#subject.name} were given`).toEqual(await contentsOf(this.args, this.#stream));
  }

  dispose(): void {
    disposeAll({ args: this.args, stream: this.#stream }, this.#subject.lasting);
  }

  #renew(): void {
    disposeAll({ args: this.args, stream: this.#stream }, this.#subject.lasting);
    this.#stream = this.#device.createStream();
    this.args = this.#subject.args(this.#device, this.#stream);
  }
}

async function contentsOf(args: unknown, stream: Stream): Promise<Record<string, ElementArray>> {
  const held: Record<string, ElementArray> = {};
  for (const { path, value } of placesOf(args, '')) if (TensorObject.is(value)) held[path] = await value.read(stream);
  return held;
}

function disposeAll(args: unknown, lasting: readonly string[] = []): void {
  for (const { path, value } of placesOf(args, '')) {
    if (lasting.includes(path.replace('args.', ''))) continue;
    if (typeof value === 'object' && value !== null && Symbol.dispose in value) (value as Disposable)[Symbol.dispose]();
  }
}

const mostBytes = 2 ** 20;
async function zeroFile(): Promise<string> {
  const path = join(await mkdtemp(join(tmpdir(), 'kv-misuse-')), 'zeros');
  writeFileSync(path, new Uint8Array(mostBytes));
  return path;
}
