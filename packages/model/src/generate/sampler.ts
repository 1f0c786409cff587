import { InvalidValueError, sample, sampleOutcomes } from '@kv/sparse-core';
import type { SampleSettings, Stream, TensorHandle } from '@kv/sparse-core';

import type { DeviceIds } from '../runner/batch-entry.js';
import type { Logits } from '../runner/head.js';

/** One chosen token: on the device at once, and as a number when the device has chosen it. */
export interface Choice {
  readonly ids: DeviceIds;
  readonly id: Promise<number>;
}

/** Chooses the tokens of one answer. */
export class Sampler implements Disposable {
  readonly #stream: Stream;
  readonly #settings: SampleSettings;
  /** Prompt and answer so far, which a repetition penalty looks at. */
  readonly #tokens: number[];
  /** The chosen token, and why there is none. */
  readonly #chosen: TensorHandle<'i32', readonly ['row']>;
  readonly #ids: DeviceIds;

  /** @throws InvalidValueError when a setting is out of its domain */
  constructor(stream: Stream, settings: SampleSettings, prompt: ArrayLike<number>) {
    this.#stream = stream;
    this.#settings = settings;
    this.#tokens = Array.from(prompt);
    this.#chosen = stream.device.tensor('i32', ['row'], [2]);
    this.#ids = this.#chosen.slice('row', 0, 1).view(['token'], [1]);
    // Choosing from a vocabulary of one shows bad settings now, not behind a long prompt.
    try {
      this.#sample(stream.device.tensor('f32', ['row', 'vocabulary'], [1, 1], new Float32Array(1)), [0]);
    } catch (error) {
      this[Symbol.dispose]();
      throw error;
    }
  }

  /** Enqueues the choice of the next token from `[1, vocabulary]` logits, which it disposes. */
  choose(logits: Logits): Choice {
    this.#sample(logits, this.#tokens);
    return { ids: this.#ids, id: this.#read() };
  }

  [Symbol.dispose](): void {
    this.#chosen.dispose();
  }

  #sample(logits: Logits, tokens: readonly number[]): void {
    const { device } = this.#stream;
    const { repetitionPenalty = 1 } = this.#settings;
    const history = repetitionPenalty === 1 ? undefined : Int32Array.from(tokens);
    try {
      using recent = history && device.tensor('i32', ['row', 'recent'], [1, history.length], history);
      const [settings, steps] = [[this.#settings], [tokens.length]];
      const output = this.#chosen.slice('row', 0, 1);
      const outcomes = this.#chosen.slice('row', 1, 2);
      sample(this.#stream, { logits, settings, steps, recent, output, outcomes });
    } finally {
      logits.dispose();
    }
  }

  async #read(): Promise<number> {
    const [id = -1, outcome = 0] = await this.#chosen.read();
    if (outcome !== 0) {
      const position = this.#tokens.length;
      throw new InvalidValueError(`There is no token at position ${position}: ${sampleOutcomes[outcome] ?? ''}.`, {
        subject: 'logits',
        given: outcome,
      });
    }
    this.#tokens.push(id);
    return id;
  }
}
