import { createRequire } from 'node:module';
import { Worker } from 'node:worker_threads';

import { DisposedError } from '@kv/sparse-core';

/**
 * The program of the worker thread. It is text, not a file, so that it starts the same way from the ESM
 * build, the CommonJS build, the sources and a user's bundle.
 */
const program = `
const { readFileSync } = require('node:fs');
const { parentPort, workerData } = require('node:worker_threads');
const { Tokenizer } = require(workerData.library);
const definition = JSON.parse(readFileSync(workerData.definitionFile, 'utf8'));
const tokenizer = new Tokenizer(definition, workerData.settings);
parentPort.on('message', ({ request, text, addSpecialTokens }) => {
  try {
    const ids = Int32Array.from(tokenizer.encode(text, { add_special_tokens: addSpecialTokens }).ids);
    parentPort.postMessage({ request, ids }, [ids.buffer]);
  } catch (error) {
    parentPort.postMessage({ request, error });
  }
});
`;

interface Answer {
  readonly request: number;
  readonly ids?: Int32Array | undefined;
  readonly error?: unknown;
}

interface Waiter {
  readonly resolve: (ids: Int32Array) => void;
  readonly reject: (reason: unknown) => void;
}

/**
 * Tokenises on a thread of its own, which starts with the first request and does not keep the process alive.
 */
export class TokenizerWorker {
  readonly #definitionFile: string;
  readonly #settings: object;
  #thread: Worker | null = null;
  #waiters = new Map<number, Waiter>();
  #requests = 0;
  #disposed = false;

  /**
   * @param definitionFile path of a tokenizer.json; the thread reads it itself, a copy would block this one
   * @param settings the content of tokenizer_config.json
   */
  constructor(definitionFile: string, settings: object) {
    this.#definitionFile = definitionFile;
    this.#settings = settings;
  }

  async encode(text: string, addSpecialTokens: boolean, signal?: AbortSignal): Promise<Int32Array> {
    if (this.#disposed) throw new DisposedError('the tokenizer was disposed; open the model again.');
    const thread = (this.#thread ??= this.#start());
    const request = this.#requests++;
    const abort = (): void => {
      this.#settle(request)?.reject(signal?.reason);
    };
    signal?.addEventListener('abort', abort, { once: true });
    try {
      return await new Promise<Int32Array>((resolve, reject) => {
        this.#waiters.set(request, { resolve, reject });
        thread.ref();
        thread.postMessage({ request, text, addSpecialTokens });
      });
    } finally {
      signal?.removeEventListener('abort', abort);
    }
  }

  dispose(): void {
    this.#disposed = true;
    void this.#thread?.terminate();
    this.#thread = null;
    this.#rejectAll(new DisposedError('the tokenizer was disposed while it worked.'));
  }

  #start(): Worker {
    const library = createRequire(import.meta.url).resolve('@huggingface/tokenizers');
    const workerData = { library, definitionFile: this.#definitionFile, settings: this.#settings };
    const thread = new Worker(program, { eval: true, workerData });
    thread.on('message', ({ request, ids, error }: Answer) => {
      const waiter = this.#settle(request);
      if (ids === undefined) waiter?.reject(error);
      else waiter?.resolve(ids);
    });
    thread.on('error', (cause) => {
      this.#thread = null;
      this.#rejectAll(cause);
    });
    return thread;
  }

  /** Takes a request off the list; an idle thread no longer keeps the process alive. */
  #settle(request: number): Waiter | undefined {
    const waiter = this.#waiters.get(request);
    this.#waiters.delete(request);
    if (this.#waiters.size === 0) this.#thread?.unref();
    return waiter;
  }

  #rejectAll(reason: unknown): void {
    const waiters = [...this.#waiters.values()];
    this.#waiters.clear();
    for (const { reject } of waiters) reject(reason);
  }
}
