import { createRowBatch, InvalidValueError } from '@kv/sparse-core';
import type { Device, FloatDType, PrefillReport, RowBatch, Stream, TensorHandle } from '@kv/sparse-core';
import { madeTogether } from '@kv/sparse-core/native';

import type { Sequence } from './sequence.js';

/**
 * `prefill`: a chunk of a prompt; `prefill-end`: its last chunk, after which the policy may drop tokens;
 * `decode`: one token of an answer.
 */
export type Phase = (typeof phases)[number];
export const phases = ['prefill', 'prefill-end', 'decode'] as const;

/** Token ids that the device has just chosen: a step on them can be enqueued before anybody knows them. */
export type DeviceIds = TensorHandle<'i32', readonly ['token']>;

/** One sequence's next tokens. */
export interface BatchEntry {
  readonly sequence: Sequence;
  readonly ids: ArrayLike<number> | DeviceIds;
  readonly phase: Phase;
}

/** How many tokens an entry contributes. */
export function countTokens({ ids }: BatchEntry): number {
  return 'dtype' in ids ? ids.shape[0] : ids.length;
}

/** Counts the tokens of an entry whose last layer is enqueued. */
export function leave(entry: BatchEntry): void {
  const { sequence, ids, phase } = entry;
  sequence.leave(countTokens(entry), 'dtype' in ids ? undefined : ids, phase !== 'decode');
}

/** The entries of a batch that go through the same attention, and where their rows are. */
export interface BatchPart {
  readonly entries: readonly BatchEntry[];
  readonly rows: RowBatch;
  readonly firstRow: number;
}

/**
 * The rows of one step on their way through the layers: entry by entry, those of prompts before those of
 * answers. Made by `Runner.createBatch`.
 */
export class ModelBatch implements Disposable {
  /** In the order of the rows. */
  readonly entries: readonly BatchEntry[];
  readonly rows: RowBatch;
  readonly prefill: BatchPart | undefined;
  readonly decode: BatchPart | undefined;
  /** i32 `[token]` */
  readonly ids: TensorHandle<'i32', readonly ['token']>;
  /** `[token, hidden]`: what the layers so far made of the rows. */
  readonly hidden: TensorHandle<FloatDType, readonly ['token', 'hidden']>;
  /** The layer that runs next; -1 before `embed`. */
  nextLayer = -1;
  /** What the prefill attention of each layer did. Nobody has to wait for those that are yet to arrive. */
  readonly reports: (PrefillReport | Promise<PrefillReport>)[] = [];
  readonly #given: readonly BatchEntry[];

  constructor(
    device: Device,
    stream: Stream,
    entries: readonly BatchEntry[],
    hiddenSize: number,
    dtype: FloatDType,
  ) {
    this.#given = entries;
    const prompts = entries.filter(({ phase }) => phase !== 'decode');
    const answers = entries.filter(({ phase }) => phase === 'decode');
    this.entries = [...prompts, ...answers];
    const promptRows = prompts.reduce((sum, entry) => sum + countTokens(entry), 0);
    const made = madeTogether((own) => {
      const rows = own(rowBatch(device, stream, this.entries));
      return {
        rows,
        prefill: part(device, stream, own, { entries: prompts, firstRow: 0, all: rows }),
        decode: part(device, stream, own, { entries: answers, firstRow: promptRows, all: rows }),
        ids: packIds(device, stream, own, this.entries),
        hidden: own(device.tensor(dtype, ['token', 'hidden'], [rows.rows, hiddenSize])),
      };
    });
    ({ rows: this.rows, prefill: this.prefill, decode: this.decode, ids: this.ids, hidden: this.hidden } = made);
  }

  /** The last row of each entry, in the order in which `createBatch` was given them. */
  get lastRows(): number[] {
    const ends = new Map<BatchEntry, number>();
    let end = 0;
    for (const entry of this.entries) ends.set(entry, (end += countTokens(entry)));
    return this.#given.map((entry) => (ends.get(entry) ?? 0) - 1);
  }

  /**
   * @param layer of so many; -1 stands for `embed`, and the one behind the last for `head`
   * @throws InvalidValueError unless it is the batch's next step
   */
  assertNext(layer: number, layers: number): void {
    if (this.nextLayer === layer) return;
    const say = (at: number): string => (at < 0 ? 'embed' : at < layers ? `layer ${at}` : 'head');
    throw new InvalidValueError(
      `The batch's next step is ${say(this.nextLayer)}, not ${say(layer)}. Run the steps in order.`,
      { subject: 'layer', given: layer, wanted: this.nextLayer },
    );
  }

  dispose(): void {
    this.prefill?.rows.dispose();
    this.decode?.rows.dispose();
    this.rows.dispose();
    this.ids.dispose();
    this.hidden.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}

function rowBatch(device: Device, stream: Stream, entries: readonly BatchEntry[]): RowBatch {
  return createRowBatch(
    device,
    stream,
    entries.map((entry) => ({
      slot: entry.sequence.slot,
      position: entry.sequence.length,
      rows: countTokens(entry),
    })),
  );
}

type Own = <Kind extends Disposable>(made: Kind) => Kind;

function part(
  device: Device,
  stream: Stream,
  own: Own,
  { entries, firstRow, all }: { entries: readonly BatchEntry[]; firstRow: number; all: RowBatch },
): BatchPart | undefined {
  if (entries.length === 0) return undefined;
  const rows = entries.length === all.entries.length ? all : own(rowBatch(device, stream, entries));
  return { entries, rows, firstRow };
}

function packIds(
  device: Device,
  stream: Stream,
  own: Own,
  entries: readonly BatchEntry[],
): TensorHandle<'i32', readonly ['token']> {
  const known = new Int32Array(entries.reduce((sum, entry) => sum + countTokens(entry), 0));
  const chosen: { ids: DeviceIds; row: number }[] = [];
  let row = 0;
  for (const entry of entries) {
    if ('dtype' in entry.ids) chosen.push({ ids: entry.ids, row });
    else known.set(entry.ids, row);
    row += countTokens(entry);
  }
  const packed = own(device.tensor('i32', ['token'], [known.length], known));
  for (const { ids, row: start } of chosen) {
    stream.copy(ids, packed.slice('token', start, start + ids.shape[0]));
  }
  return packed;
}
