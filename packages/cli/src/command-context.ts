import type { TextOutput } from './text-output.js';

/** Where the command writes: results to `stdout`, progress, timing and errors to `stderr`. */
export interface CliStreams {
  readonly stdout: NodeJS.WritableStream;
  readonly stderr: NodeJS.WritableStream;
}

/** What every command gets beside its own arguments. */
export interface CommandContext {
  readonly stdout: TextOutput;
  readonly stderr: TextOutput;
  /** Aborted by Ctrl-C, and when nobody can read the results any more. */
  readonly signal: AbortSignal;
}
