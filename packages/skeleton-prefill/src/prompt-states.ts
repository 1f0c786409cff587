import type { Device, KvBytes, PrefillState, Stream, TensorHandle } from '@kv/sparse-core';

/** What the steps of one prompt leave for those to come. */
export interface PromptState {
  readonly state: TensorHandle<'u8', readonly ['byte']>;
  seenTokens: number;
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
      if (kept.seenTokens > position) kept.seenTokens = 0;
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
    stream.copy(from.state, to.state);
    to.seenTokens = from.seenTokens;
  }

  release(_stream: Stream, slot: number): void {
    this.#prompts.get(slot)?.state.dispose();
    this.#prompts.delete(slot);
  }

  bytes(): KvBytes {
    const device = [...this.#prompts.values()].reduce((sum, { state }) => sum + state.byteLength, 0);
    return { device, host: 0 };
  }

  dispose(): void {
    for (const { state } of this.#prompts.values()) state.dispose();
    this.#prompts.clear();
  }
}
