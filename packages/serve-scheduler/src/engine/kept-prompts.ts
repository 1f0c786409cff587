import type { Sequence } from '@kv/model';

interface KeptPrompt {
  readonly prompt: Int32Array;
  readonly sequence: Sequence;
}

/** The first tokens of a prompt, and a sequence that holds them. */
export interface KeptPrefix {
  readonly sequence: Sequence;
  readonly tokens: number;
}

/** Prompts that were read and stay in memory, for others that begin with the same tokens. */
export class KeptPrompts implements Disposable {
  readonly #mostPrompts: number;
  readonly #mostTokens: number;
  readonly #grid: number;
  /** The least recently used one first. None is the beginning of another. */
  #kept: KeptPrompt[] = [];

  /**
   * @param mostTokens of all of them together
   * @param grid a prefix has a multiple of so many tokens
   */
  constructor(mostPrompts: number, mostTokens: number, grid: number) {
    this.#mostPrompts = mostPrompts;
    this.#mostTokens = mostTokens;
    this.#grid = grid;
  }

  /** The longest beginning that a prompt has in common with one that is kept, without its last token, which gives the answer. */
  find(prompt: Int32Array): KeptPrefix | undefined {
    const most = Math.floor((prompt.length - 1) / this.#grid);
    let found: KeptPrompt | undefined;
    let steps = 0;
    for (const kept of this.#kept) {
      if (!isPrefix(kept.prompt, prompt, (steps + 1) * this.#grid)) continue;
      const shared = sharedSteps(kept.prompt, prompt, this.#grid, most);
      if (shared > steps) [found, steps] = [kept, shared];
    }
    if (found === undefined) return undefined;
    this.#kept = [...this.#kept.filter((kept) => kept !== found), found];
    return { sequence: found.sequence, tokens: steps * this.#grid };
  }

  /** Takes a sequence that holds a prompt and no more, or disposes it. Others make room for it. */
  keep(prompt: Int32Array, sequence: Sequence): void {
    const covers = this.#kept.some((kept) => isPrefix(kept.prompt, prompt, prompt.length));
    if (covers || prompt.length > this.#mostTokens || prompt.length <= this.#grid) {
      sequence.dispose();
      return;
    }
    this.#drop((kept) => isPrefix(prompt, kept.prompt, kept.prompt.length));
    this.#kept.push({ prompt, sequence });
    let tokens = this.#kept.reduce((sum, kept) => sum + kept.prompt.length, 0);
    let surplus = this.#kept.length - this.#mostPrompts;
    this.#drop((kept) => {
      if (surplus <= 0 && tokens <= this.#mostTokens) return false;
      surplus -= 1;
      tokens -= kept.prompt.length;
      return true;
    });
  }

  /** How many there are. */
  get count(): number {
    return this.#kept.length;
  }

  [Symbol.dispose](): void {
    this.#drop(() => true);
  }

  #drop(isDropped: (kept: KeptPrompt) => boolean): void {
    this.#kept = this.#kept.filter((kept) => {
      const drops = isDropped(kept);
      if (drops) kept.sequence.dispose();
      return !drops;
    });
  }
}

/** Whether two prompts have so many tokens, and the same ones. */
function isPrefix(one: Int32Array, other: Int32Array, tokens: number): boolean {
  if (tokens > Math.min(one.length, other.length)) return false;
  return Buffer.compare(bytesOf(one, tokens), bytesOf(other, tokens)) === 0;
}

function bytesOf(ids: Int32Array, tokens: number): Uint8Array {
  return new Uint8Array(ids.buffer, ids.byteOffset, 4 * tokens);
}

/** How many steps of a grid two prompts have in common, by halving: comparing bytes is fast, looking at each token is not. */
function sharedSteps(one: Int32Array, other: Int32Array, grid: number, most: number): number {
  let [least, end] = [0, most + 1];
  while (end - least > 1) {
    const middle = (least + end) >> 1;
    if (isPrefix(one, other, middle * grid)) least = middle;
    else end = middle;
  }
  return least;
}
