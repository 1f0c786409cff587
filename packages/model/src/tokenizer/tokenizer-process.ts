import { spawn } from 'node:child_process';
import type { ChildProcess } from 'node:child_process';
import { createRequire } from 'node:module';

import { CapabilityError, DisposedError, ModelFormatError } from '@kv/sparse-core';
import { whenAborted } from '@kv/sparse-core/native';

import { computingTime } from './computing-time.js';
import { tokenizerLimits } from './tokenizer-limits.js';
import { tokenizerProgram } from './tokenizer-program.js';
import type { SpelledVocabulary } from './vocabulary.js';

/** What a tokenizer is made of. */
export interface TokenizerParts {
  /** Path of tokenizer.json: the process reads it itself, a copy would block this one. */
  readonly definitionFile: string;
  readonly definitionBytes: number;
  /** The text of tokenizer_config.json. */
  readonly settings: string;
  /** The source of the chat template. */
  readonly template: string | null;
}

/** What the library says of a file or a text; whoever asked knows which error that is. */
export class Refusal extends Error {
  /** What was refused: the chat template, a decoder that cannot spell token by token, or anything else. */
  readonly of: 'template' | 'decoder' | 'tokenizer';

  constructor(reason: string, of: Refusal['of']) {
    super(reason);
    this.of = of;
  }
}

/** How much longer than this process waits the other one works by itself: it may have lost its parent. */
const orphanMilliseconds = 1000;

interface Request {
  readonly operation: 'open' | 'encode' | 'tokenId' | 'render';
  readonly argument: object;
  /** What is done, for messages. */
  readonly doing: string;
  readonly milliseconds: number;
  readonly signal: AbortSignal | undefined;
}

interface Pending {
  readonly doing: string;
  readonly resolve: (answer: Answer) => void;
  readonly reject: (reason: unknown) => void;
}

interface Answer {
  readonly value?: unknown;
  readonly error?: { readonly reason: string; readonly of: Refusal['of'] } | undefined;
}

/**
 * A process that does what a model's files decide: it runs their regular expressions and their chat template, one
 * request at a time. It is a process, not a thread, because the engine ends the process in which a single large
 * allocation fails. A request that takes too long ends it, and so does one that was aborted and still goes on after as long
 * as starting takes; the next one starts another.
 * It does not keep this process alive.
 */
export class TokenizerProcess implements Disposable {
  readonly #parts: TokenizerParts;
  #child: ChildProcess | undefined;
  /** The request that the process works on. */
  #pending: Pending | undefined;
  #last: Promise<unknown> = Promise.resolve();
  /** Milliseconds that starting it took. */
  #starting = 0;
  #disposed = false;

  constructor(parts: TokenizerParts) {
    this.#parts = parts;
  }

  /** Starts the process. @throws Refusal when the library refuses a file */
  async open(): Promise<SpelledVocabulary> {
    return (await this.#inTurn(() => this.#start(undefined), undefined)) as SpelledVocabulary;
  }

  /** @throws Refusal when the tokenizer makes a token that has no id */
  async encode(text: string, addSpecialTokens: boolean, signal: AbortSignal | undefined): Promise<Int32Array> {
    const milliseconds = tokenizerLimits.millisecondsPerCharacter * text.length;
    const doing = `tokenizing ${text.length} characters`;
    const request = { operation: 'encode', argument: { text, addSpecialTokens }, doing, signal } as const;
    return (await this.#request({ ...request, milliseconds })) as Int32Array;
  }

  async tokenId(token: string): Promise<number | undefined> {
    const request = { operation: 'tokenId', argument: { token }, doing: 'finding a token' } as const;
    return (await this.#request({ ...request, milliseconds: 0, signal: undefined })) as number | undefined;
  }

  /** @throws Refusal when the template refuses the values; DataCloneError when they cannot be sent */
  async render(values: Readonly<Record<string, unknown>>, signal: AbortSignal | undefined): Promise<string> {
    const request = { operation: 'render', argument: { values }, doing: 'rendering the chat template' } as const;
    return (await this.#request({ ...request, milliseconds: 0, signal })) as string;
  }

  dispose(): void {
    this.#disposed = true;
    if (this.#child !== undefined) this.#end(this.#child, new DisposedError('the tokenizer was disposed while it worked.'));
  }

  [Symbol.dispose](): void {
    this.dispose();
  }

  #request(request: Request): Promise<unknown> {
    const { signal } = request;
    return this.#inTurn(async () => {
      if (this.#child === undefined) await this.#start(signal);
      signal?.throwIfAborted();
      return await this.#exchange(request);
    }, signal);
  }

  /** Does `work` when what was asked before is done; an aborted request is not waited for. */
  async #inTurn(work: () => Promise<unknown>, signal: AbortSignal | undefined): Promise<unknown> {
    const turn = this.#last.then(() => {
      signal?.throwIfAborted();
      return work();
    });
    this.#last = turn.catch(() => undefined);
    return await unlessAborted(turn, signal);
  }

  async #start(signal: AbortSignal | undefined): Promise<unknown> {
    if (this.#disposed) throw new DisposedError('the tokenizer was disposed; open the model again.');
    const child = this.#spawn();
    this.#child = child;
    const { resolve } = createRequire(import.meta.url);
    const libraries = { tokenizers: resolve('@huggingface/tokenizers'), jinja: resolve('@huggingface/jinja') };
    const { definitionBytes, ...parts } = this.#parts;
    const milliseconds = tokenizerLimits.millisecondsPerByte * definitionBytes;
    const argument = { ...parts, ...libraries };
    const began = performance.now();
    try {
      const opened = await this.#exchange({ operation: 'open', argument, doing: 'opening it', milliseconds, signal });
      this.#starting = performance.now() - began;
      return opened;
    } catch (error) {
      this.#end(child, error);
      throw error;
    }
  }

  #spawn(): ChildProcess {
    const heap = `--max-old-space-size=${tokenizerLimits.heapMegabytes}`;
    const child = spawn(process.execPath, [heap, '--eval', tokenizerProgram], {
      stdio: ['ignore', 'ignore', 'ignore', 'ipc'],
      serialization: 'advanced',
      // A session of its own: an interrupt from the terminal is for this process to answer.
      detached: true,
      env: { ...process.env, NODE_OPTIONS: '' },
    });
    child.on('message', (answer: Answer) => {
      // One that was ended may have answered before: what is pending now was asked of another.
      if (this.#child === child) this.#pending?.resolve(answer);
    });
    child.on('exit', (_code, by) => {
      this.#end(child, this.#failure(`an end of its process (${String(by)})`, 'an answer'));
    });
    child.on('error', (cause) => {
      this.#end(child, noProcess(cause));
    });
    return child;
  }

  /** Ends the process, and with it the request that it works on. */
  #end(child: ChildProcess, reason: unknown): void {
    if (this.#child !== child) return;
    this.#child = undefined;
    child.kill('SIGKILL');
    this.#pending?.reject(reason);
  }

  /** Sends one request and waits for its answer, but no longer than it may take. */
  async #exchange({ operation, argument, doing, milliseconds, signal }: Request): Promise<unknown> {
    const child = this.#child;
    if (child === undefined) throw this.#failure('an end of its process', 'an answer');
    const most = tokenizerLimits.milliseconds + milliseconds;
    const mostWaiting = tokenizerLimits.waitingFactor * most;
    const stopWatching = watch(child, most, mostWaiting, (spent) => {
      this.#end(child, this.#failure(`more than ${spent}`, `at most ${spent}`));
    });
    let givesUp: NodeJS.Timeout | undefined;
    const unlisten = whenAborted(signal, () => {
      givesUp = setTimeout(() => this.#end(child, signal?.reason), this.#starting);
    });
    keepsAlive(child, true);
    try {
      const { value, error } = await new Promise<Answer>((resolve, reject) => {
        this.#pending = { doing, resolve, reject };
        child.send({ operation, argument, milliseconds: Math.ceil(mostWaiting + orphanMilliseconds) }, (cause) => {
          if (cause !== null) this.#end(child, this.#failure(`an end of its process (${cause.message})`, 'an answer'));
        });
      });
      if (error !== undefined) throw new Refusal(error.reason, error.of);
      return value;
    } finally {
      this.#pending = undefined;
      stopWatching();
      clearTimeout(givesUp);
      unlisten();
      keepsAlive(child, false);
    }
  }

  #failure(given: string, wanted: string): ModelFormatError {
    const { definitionFile } = this.#parts;
    const { heapMegabytes } = tokenizerLimits;
    return new ModelFormatError(
      `${definitionFile}: ${this.#pending?.doing ?? 'starting'} took ${given}; wanted ${wanted}, with at most ` +
        `${heapMegabytes} MiB. The next call starts another process. Fetch the model from a source you trust.`,
      { subject: definitionFile, given, wanted },
    );
  }
}

function noProcess(cause: Error): CapabilityError {
  return new CapabilityError(
    `the tokenizer works in a process of its own, which could not be started (${cause.message}). ` +
      'Let this process start others.',
    { subject: 'tokenizer', given: cause.message, wanted: 'a process', cause },
  );
}

/**
 * Calls `tooLong` when the process has computed for longer than `most` milliseconds, or `mostWaiting` are over: on a busy
 * machine it waits for its turn. Where the system does not say what it computed, all of the time counts.
 * @returns ends the watch
 */
function watch(child: ChildProcess, most: number, mostWaiting: number, tooLong: (spent: string) => void): () => void {
  const started = performance.now();
  const before = computingTime(child.pid) ?? 0;
  const look = (): void => {
    const elapsed = performance.now() - started;
    const computed = (computingTime(child.pid) ?? Infinity) - before;
    const left = Math.min(most - Math.min(computed, elapsed), mostWaiting - elapsed);
    if (left > 0) timer = setTimeout(look, left);
    else tooLong(elapsed < mostWaiting ? `${Math.ceil(most / 1000)} s of computing` : `${Math.ceil(mostWaiting / 1000)} s`);
  };
  let timer = setTimeout(look, most);
  return () => {
    clearTimeout(timer);
  };
}

function keepsAlive(child: ChildProcess, keeps: boolean): void {
  if (keeps) {
    child.ref();
    child.channel?.ref();
  } else {
    child.unref();
    child.channel?.unref();
  }
}

/** What `work` gives, or the signal's reason as soon as it is aborted. */
async function unlessAborted(work: Promise<unknown>, signal: AbortSignal | undefined): Promise<unknown> {
  if (signal === undefined) return await work;
  let unlisten = (): void => undefined;
  const aborted = new Promise((_resolve, reject) => {
    unlisten = whenAborted(signal, () => {
      reject(signal.reason as Error);
    });
  });
  try {
    return await Promise.race([work, aborted]);
  } finally {
    unlisten();
  }
}
