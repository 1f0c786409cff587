import type { DType } from './dtype.js';
import { InvalidValueError, ShapeError } from './errors.js';
import type { Stream } from './handles.js';
import { areBlocksApart, coincide, overlap } from './overlap.js';
import { describe, type TensorObject, tensorOn } from './tensor.js';
import {
  expectContiguous,
  expectContiguousRows,
  expectDType,
  expectObject,
  expectReachable,
  expectSameStrides,
  expectWritable,
} from './validate.js';

export const floats = ['f32', 'f16', 'bf16'] as const;

/** What an operation demands of one of its tensors. The tensors that a rule names stand before it. */
export interface TensorRule {
  /** Where the tensor stands in the arguments: `output`, `blocks.keys`. */
  readonly name: string;
  readonly dtype?: readonly DType[] | undefined;
  /** A tensor whose dtype it may have, too. */
  readonly dtypeOf?: string | undefined;
  /**
   * The extent of each axis. A name stands for one number in all tensors of a call; `...`, at the end, for any number
   * of axes.
   */
  readonly shape: readonly AxisRule[];
  /** `rows`: the elements of the last axis lie next to each other. `contiguous`: all do, in row-major order. */
  readonly layout: 'rows' | 'contiguous';
  /** The kernels count its rows with 64 bits: the first axis may have more than 2^31 - 1. */
  readonly longRows?: true | undefined;
  /** A tensor that is laid out alike. */
  readonly stridesOf?: string | undefined;
  readonly optional?: true | undefined;
  /** Inputs that an output may be, element for element. */
  readonly inPlaceOf?: readonly string[] | undefined;
  /** A pool that it may share whole blocks with: tables say which block is whose. */
  readonly poolWith?: string | undefined;
}

export type AxisRule = string | number | { readonly of: string; readonly plus: number };

type Given = TensorObject | undefined;

/** A rule with what its names mean. */
interface Rule {
  readonly index: number;
  readonly name: string;
  /** Where in the arguments the tensor stands: a field of an object of an object. */
  readonly path: readonly string[];
  readonly dtype: readonly DType[];
  readonly shape: TensorRule['shape'];
  readonly layout: TensorRule['layout'];
  readonly inPlaceOf: readonly string[];
  /** Positions of other tensors; -1 for none. */
  readonly dtypeOf: number;
  readonly stridesOf: number;
  readonly poolWith: number;
  readonly optional: boolean;
  readonly written: boolean;
  readonly axes: readonly Axis[];
  /** Whether more axes may follow. */
  readonly open: boolean;
}

/** An axis that has `plus` elements, and as many more as what stands in `place`, where a name has its number. */
interface Axis {
  readonly place: number;
  readonly plus: number;
  readonly most: number;
}

/** An extent past this does not fit the counters of most kernels. */
const mostExtent = 2 ** 31 - 1;

/** The rules of an operation's tensors, and which of these it writes to. */
export class TensorRules {
  // Not `#operation`: the CommonJS build would assign to the export of that name.
  readonly #subject: string;
  readonly #rules: readonly Rule[];
  /** What the names of extents stand for in the call that is being checked; -1 for nothing yet. The first is 0. */
  readonly #extents: number[];

  constructor(operation: string, rules: readonly TensorRule[], outputs: readonly string[]) {
    const positionOf = (name?: string) => rules.findIndex((rule) => rule.name === name);
    const extents = [''];
    const placeOf = (name: string) => (extents.includes(name) ? extents.indexOf(name) : extents.push(name) - 1);
    const axisOf = (axis: AxisRule, most: number): Axis => {
      if (typeof axis === 'number') return { place: 0, plus: axis, most };
      if (typeof axis === 'string') return { place: placeOf(axis), plus: 0, most };
      return { place: placeOf(axis.of), plus: axis.plus, most };
    };
    this.#subject = operation;
    // The same fields in the same order: reading them is most of a check's time otherwise.
    this.#rules = rules.map((rule, index) => ({
      index,
      name: rule.name,
      path: rule.name.split('.'),
      dtype: rule.dtype ?? [],
      dtypeOf: positionOf(rule.dtypeOf),
      shape: rule.shape,
      layout: rule.layout,
      stridesOf: positionOf(rule.stridesOf),
      optional: rule.optional === true,
      inPlaceOf: rule.inPlaceOf ?? [],
      poolWith: positionOf(rule.poolWith),
      written: outputs.includes(rule.name),
      axes: rule.shape
        .filter((axis) => axis !== '...')
        .map((axis, index) => axisOf(axis, rule.longRows && index === 0 ? Number.MAX_SAFE_INTEGER : mostExtent)),
      open: rule.shape.includes('...'),
    }));
    this.#extents = extents.map(() => 0);
  }

  /**
   * The tensors that stand in the arguments, checked.
   * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
   */
  tensorsOf(args: object, stream: Stream): Given[] {
    const tensors: Given[] = [];
    for (const rule of this.#rules) tensors.push(this.#tensorAt(args, rule, stream));
    this.#extents.fill(-1, 1);
    for (const rule of this.#rules) this.#expectRule(rule, tensors);
    for (const rule of this.#rules) if (rule.written) this.#expectOutput(rule, tensors);
    for (const { name, index } of this.#rules) expectReachable(this.#subject, name, tensors[index]);
    return tensors;
  }

  markWritten(tensors: readonly Given[], stream: Stream): void {
    for (const { written, index } of this.#rules) if (written) tensors[index]?.writtenBy(stream);
  }

  #tensorAt(args: object, { name, path, optional }: Rule, stream: Stream): Given {
    let given: unknown = args;
    for (const field of path) {
      if (given === undefined && optional) return undefined;
      if (typeof given !== 'object' || given === null) {
        const behind = path.slice(0, path.indexOf(field)).join('.');
        expectObject(this.#subject, behind === '' ? 'the arguments' : behind, given);
      }
      given = (given as Record<string, unknown>)[field];
    }
    return given === undefined && optional ? undefined : tensorOn(this.#subject, name, given, stream);
  }

  #expectRule(rule: Rule, tensors: readonly Given[]): void {
    const { name, dtype, dtypeOf, axes, open, layout, stridesOf } = rule;
    const tensor = tensors[rule.index];
    if (tensor === undefined) return;
    const partner = dtypeOf === -1 ? undefined : tensors[dtypeOf]?.dtype;
    if (tensor.dtype !== partner && !dtype.includes(tensor.dtype)) {
      expectDType(this.#subject, name, tensor, partner === undefined ? dtype : [...dtype, partner]);
    }
    const extents = this.#extents;
    const shape: readonly number[] = tensor.shape;
    let fits = open ? shape.length >= axes.length : shape.length === axes.length;
    let axis = 0;
    for (const { place, plus, most } of axes) {
      const extent = shape[axis++] ?? -1;
      if (extents[place] === -1) extents[place] = extent - plus;
      fits = fits && extent <= most && extent === (extents[place] ?? 0) + plus;
    }
    if (!fits) this.#refuseShape(rule, tensor);
    if (layout === 'rows') expectContiguousRows(this.#subject, name, tensor);
    else expectContiguous(this.#subject, name, tensor);
    const alike = stridesOf === -1 ? undefined : tensors[stridesOf];
    if (alike !== undefined) expectSameStrides(this.#subject, name, tensor, alike);
  }

  #refuseShape({ name, axes, shape }: Rule, tensor: TensorObject): never {
    const long = axes.findIndex(({ most }, axis) => (tensor.shape[axis] ?? 0) > most);
    if (long !== -1) {
      throw new ShapeError(
        `${this.#subject}: ${name} is ${describe(tensor)}; the kernels count ${tensor.axes[long] ?? ''} up to ${mostExtent}. ` +
          'Give slices of it.',
        { subject: name, given: tensor.shape, wanted: mostExtent },
      );
    }
    const wanted = shape.map((axis, position) => {
      const { place = 0, plus = 0 } = axes[position] ?? {};
      const known = this.#extents[place] ?? 0;
      if (axis === '...' || known === -1) return typeof axis === 'object' ? axis.of : axis;
      return known + plus;
    });
    throw new ShapeError(
      `${this.#subject}: ${name} is ${describe(tensor)}; its shape must be [${wanted.join(', ')}].`,
      { subject: name, given: tensor.shape, wanted },
    );
  }

  /** @throws InvalidValueError when an output is read-only, or shares memory with another tensor of the call */
  #expectOutput(output: Rule, tensors: readonly Given[]): void {
    const tensor = tensors[output.index];
    if (tensor === undefined) return;
    expectWritable(this.#subject, output.name, tensor);
    for (const rule of this.#rules) {
      const other = tensors[rule.index];
      if (other === undefined || rule === output || !overlap(tensor, other)) continue;
      if (output.inPlaceOf.includes(rule.name) && coincide(tensor, other)) continue;
      const pools = output.poolWith === rule.index || rule.poolWith === output.index;
      if (pools && areBlocksApart(tensor, other)) continue;
      const what = rule.written ? `another output, ${rule.name}` : `the input ${rule.name}`;
      throw new InvalidValueError(
        `${this.#subject}: the output ${output.name} shares memory with ${what}; give each output its own.`,
        { subject: output.name },
      );
    }
  }
}
