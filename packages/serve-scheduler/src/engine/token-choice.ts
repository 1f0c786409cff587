import { InvalidValueError, sample, sampleOutcomes } from '@kv/sparse-core';
import type { SampleSettings, Stream, TensorHandle } from '@kv/sparse-core';
import type { DeviceIds, Logits } from '@kv/model';

/** A row of scores, and what its token follows from. */
export interface ChoiceRow {
  readonly sampling: SampleSettings;
  /** The prompt and the answer so far. */
  readonly tokens: readonly number[];
}

/** Chooses the tokens of a step's rows, and holds them on the device until the next step but one. */
export class TokenChoice implements Disposable {
  readonly #rows: number;
  /** The tokens of all rows, and then why there are none. */
  readonly #chosen: TensorHandle<'i32', readonly ['row']>;
  readonly #ids: readonly DeviceIds[];
  /** The parts of `#chosen` that were asked for, by where they begin and end: steps ask for the same ones. */
  readonly #parts = new Map<string, TensorHandle<'i32', readonly ['row']>>();

  constructor(stream: Stream, rows: number) {
    this.#rows = rows;
    this.#chosen = stream.device.tensor('i32', ['row'], [2 * rows]);
    this.#ids = Array.from({ length: rows }, (_, row) => this.#chosen.slice('row', row, row + 1).view(['token'], [1]));
  }

  /** The token of a row, for a step that is enqueued before anybody knows it. */
  idsOf(row: number): DeviceIds {
    const ids = this.#ids[row];
    if (ids === undefined) throw new Error(`there is no row ${row} of ${this.#rows}`);
    return ids;
  }

  /** Enqueues the choice for rows from `first` on, one for each of the logits, which it disposes. */
  choose(stream: Stream, first: number, logits: Logits, rows: readonly ChoiceRow[]): void {
    const { device } = stream;
    const penalised = rows.some(({ sampling: { repetitionPenalty = 1 } }) => repetitionPenalty !== 1);
    const longest = penalised ? Math.max(...rows.map(({ tokens }) => tokens.length)) : 0;
    try {
      using recent = penalised ? device.tensor('i32', ['row', 'recent'], [rows.length, longest], padded(rows, longest)) : undefined;
      sample(stream, {
        logits,
        settings: rows.map(({ sampling }) => sampling),
        // As in `generateTokens`: a draw follows from the seed and the token's position.
        steps: rows.map(({ tokens }) => tokens.length),
        recent,
        output: this.#part(first, first + rows.length),
        outcomes: this.#part(this.#rows + first, this.#rows + first + rows.length),
      });
    } finally {
      logits.dispose();
    }
  }

  /** What the first rows chose, each a token or an error. */
  async read(rows: number): Promise<(number | InvalidValueError)[]> {
    const chosen = await this.#chosen.read();
    return Array.from({ length: rows }, (_, row) => {
      const [id = -1, outcome = 0] = [chosen[row], chosen[this.#rows + row]];
      if (outcome === 0) return id;
      return new InvalidValueError(`There is no next token: ${sampleOutcomes[outcome] ?? ''}.`, { subject: 'logits', given: outcome });
    });
  }

  [Symbol.dispose](): void {
    this.#parts.clear();
    this.#chosen.dispose();
  }

  #part(first: number, end: number): TensorHandle<'i32', readonly ['row']> {
    const name = `${first} ${end}`;
    const part = this.#parts.get(name) ?? this.#chosen.slice('row', first, end);
    this.#parts.set(name, part);
    return part;
  }
}

/** i32 `[row, recent]`, -1 behind the tokens of a row. */
function padded(rows: readonly ChoiceRow[], longest: number): Int32Array {
  const recent = new Int32Array(rows.length * longest).fill(-1);
  rows.forEach(({ tokens }, row) => {
    recent.set(tokens, row * longest);
  });
  return recent;
}
