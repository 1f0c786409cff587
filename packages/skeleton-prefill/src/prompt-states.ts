import type { Device, KvBytes, PrefillState, Stream, TensorHandle } from '@kv/sparse-core';

/** What the steps of one prompt leave for those to come. */
export interface PromptState {
  readonly state: TensorHandle<'u8', readonly ['byte']>;
  seenTokens: number;
  /** The tile that a budget goes by, and how many blocks each tile of its step took. */
  reference?: Reference | undefined;
}

interface Reference {
  readonly keyBlockCounts: TensorHandle<'i32', readonly ['queryHead', 'queryTile']>;
  readonly tile: number;
}

/** Of one layer: a state for each slot whose prompt is between two steps. */
export class PromptStates implements PrefillState {
  readonly #device: Device;
  readonly #prompts = new Map<number, PromptState>();

  constructor(device: Device) {
    this.#device = device;
  }

  /**
   * The state of a slot, empty where there is none or it is of tokens that the slot holds no more.
   * @throws OutOfMemoryError
   */
  of(slot: number, position: number, bytes: number): PromptState {
    const kept = this.#prompts.get(slot);
    if (kept !== undefined) {
      if (kept.seenTokens > position) forget(kept);
      return kept;
    }
    const made = { state: this.#device.tensor('u8', ['byte'], [bytes]), seenTokens: 0 };
    this.#prompts.set(slot, made);
    return made;
  }

  copy(stream: Stream, fromSlot: number, toSlot: number): void {
    const from = this.#prompts.get(fromSlot);
    if (from === undefined) return;
    const to = this.of(toSlot, 0, from.state.byteLength);
    try {
      to.reference = from.reference && { ...from.reference, keyBlockCounts: this.#copied(stream, from.reference) };
    } catch (error) {
      this.release(stream, toSlot);
      throw error;
    }
    stream.copy(from.state, to.state);
    to.seenTokens = from.seenTokens;
  }

  #copied(stream: Stream, { keyBlockCounts }: Reference): Reference['keyBlockCounts'] {
    const copied = this.#device.tensor('i32', keyBlockCounts.axes, keyBlockCounts.shape);
    stream.copy(keyBlockCounts, copied);
    return copied;
  }

  release(_stream: Stream, slot: number): void {
    const prompt = this.#prompts.get(slot);
    if (prompt === undefined) return;
    forget(prompt);
    prompt.state.dispose();
    this.#prompts.delete(slot);
  }

  bytes(): KvBytes {
    const bytesOf = ({ state, reference }: PromptState) => state.byteLength + (reference?.keyBlockCounts.byteLength ?? 0);
    return { device: [...this.#prompts.values()].reduce((sum, prompt) => sum + bytesOf(prompt), 0), host: 0 };
  }

  dispose(): void {
    for (const prompt of this.#prompts.values()) {
      forget(prompt);
      prompt.state.dispose();
    }
    this.#prompts.clear();
  }
}

function forget(prompt: PromptState): void {
  prompt.seenTokens = 0;
  prompt.reference?.keyBlockCounts.dispose();
  prompt.reference = undefined;
}
