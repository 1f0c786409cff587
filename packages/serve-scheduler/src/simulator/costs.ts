import { InvalidValueError } from '@kv/sparse-core';
import { expectThat } from '@kv/sparse-core/native';
import { z } from 'zod';

import h200 from './h200-costs.json' with { type: 'json' };

const count = z.number().int().positive();
const point = z.strictObject({ at: z.number().positive(), milliseconds: z.number().positive(), from: z.string().min(1) });
const table = z.strictObject({ unit: z.string(), points: z.array(point).min(2) });
const rate = z.strictObject({ rate: z.number().positive(), from: z.string().min(1) });
const schema = z.strictObject({
  gpu: z.string(),
  driver: z.string(),
  clockMegahertz: z.number().positive(),
  /** The model whose steps were measured. */
  model: z.strictObject({ parameters: count, layers: count, queryHeads: count, kvHeads: count, headDim: count }),
  tables: z.strictObject({ rows: table, decodeAttention: table, prefillAttention: table, selection: table, keeping: table, placing: table }),
  gigabytesPerSecond: z.strictObject({ gather: rate, copies: rate, save: rate, saveCopies: rate }),
  /** What a prompt over two memories takes longer than a dense one, as a share of the time of its saves. */
  besideSaves: z.strictObject({ share: z.number().nonnegative(), from: z.string().min(1) }),
});

type Parsed = z.infer<typeof schema>;
type TableName = keyof Parsed['tables'];
export type RateName = keyof Parsed['gigabytesPerSecond'];

/** What steps cost on one GPU: tables of measured times, linear between their points. */
export class Costs {
  readonly gpu: string;
  readonly measured: Parsed['model'];
  readonly besideSaves: number;
  readonly #parsed: Parsed;

  /**
   * @param given as `h200-costs.json`; each point says from which measured row it is, or how it was computed
   * @param gpu the GPU that the tables have to be of
   * @throws InvalidValueError for what is no such table, one that falls somewhere, or tables of another GPU
   */
  constructor(given: unknown = h200, gpu?: string) {
    const { data, error } = schema.safeParse(given);
    if (error) {
      const [issue] = error.issues;
      const where = issue?.path.join('.') ?? '';
      const at = where === '' ? '' : ` at '${where}'`;
      throw new InvalidValueError(`The cost tables are malformed${at}: ${issue?.message ?? ''}. Take h200-costs.json as an example.`, { subject: where || 'costs' });
    }
    for (const [name, { points }] of Object.entries(data.tables)) expectMonotone(name, points);
    if (gpu !== undefined && data.gpu !== gpu) {
      throw new InvalidValueError(`The cost tables are of '${data.gpu}', and those of '${gpu}' are wanted. Measure that one, or ask for the other.`, {
        subject: 'gpu',
        given: data.gpu,
        wanted: gpu,
      });
    }
    this.#parsed = data;
    this.gpu = data.gpu;
    this.measured = data.model;
    this.besideSaves = data.besideSaves.share;
  }

  /** Whether it is one, and no look-alike or proxy. */
  static is(value: unknown): value is Costs {
    return typeof value === 'object' && value !== null && #parsed in value;
  }

  /** Milliseconds: the first point's before it, and behind the last one the line of the last two goes on. */
  milliseconds(name: TableName, at: number): number {
    expectNamed('milliseconds', name, this.#parsed.tables);
    expectThat('milliseconds', 'at', at, Number.isFinite(at) && at >= 0, 'a finite number from 0 on');
    const { points } = this.#parsed.tables[name];
    const above = points.findIndex((each) => each.at >= at);
    if (above === 0) return points[0]?.milliseconds ?? NaN;
    const next = above < 0 ? points.length - 1 : above;
    const [low, high] = [points[next - 1], points[next]];
    if (low === undefined || high === undefined) return NaN;
    return low.milliseconds + ((at - low.at) / (high.at - low.at)) * (high.milliseconds - low.milliseconds);
  }

  /** Of the link, in GB/s, and where it is from. */
  rate(name: RateName): { readonly rate: number; readonly from: string } {
    expectNamed('rate', name, this.#parsed.gigabytesPerSecond);
    return this.#parsed.gigabytesPerSecond[name];
  }

  /** Milliseconds that bytes take over the link. */
  transfer(name: RateName, bytes: number): number {
    expectThat('transfer', 'bytes', bytes, Number.isFinite(bytes) && bytes >= 0, 'a finite number from 0 on');
    return bytes / (1e6 * this.rate(name).rate);
  }
}

function expectNamed(operation: string, name: string, all: object): void {
  expectThat(operation, 'name', name, Object.keys(all).includes(name), `one of ${Object.keys(all).join(', ')}`);
}

function expectMonotone(name: string, points: readonly { readonly at: number; readonly milliseconds: number }[]): void {
  const falls = points.findIndex((each, index) => {
    const before = points[index - 1];
    return before !== undefined && (each.at <= before.at || each.milliseconds < before.milliseconds);
  });
  if (falls < 0) return;
  throw new InvalidValueError(`The cost table '${name}' falls at its point ${falls}; more work takes no less time.`, {
    subject: `tables.${name}.points.${falls}`,
    given: points[falls],
  });
}
