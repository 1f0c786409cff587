import type { Writable } from 'node:stream';

import { expectObject, expectThat } from '@kv/sparse-core/native';

import type { TextOutput } from './text-output.js';

/** Where the command writes: results to `stdout`, progress, timing and errors to `stderr`. */
export interface CliStreams {
  readonly stdout: NodeJS.WritableStream;
  readonly stderr: NodeJS.WritableStream;
}

/** @throws InvalidValueError unless both were opened, whether or not they can still be written to */
export function expectStreams(given: CliStreams): void {
  expectObject('runCli', 'streams', given);
  const { stdout, stderr } = given;
  for (const [name, stream] of Object.entries({ stdout, stderr })) {
    expectObject('runCli', name, stream);
    const { writable, destroyed = false, writableEnded = false } = stream as Partial<Writable>;
    const wasOpened = writable === true || destroyed || writableEnded;
    expectThat('runCli', name, stream, wasOpened && typeof stream.write === 'function', 'a stream to write to');
  }
}

/** What every command gets beside its own arguments. */
export interface CommandContext {
  readonly stdout: TextOutput;
  readonly stderr: TextOutput;
  /** Aborted by Ctrl-C, and when nobody can read the results any more. */
  readonly signal: AbortSignal;
}
