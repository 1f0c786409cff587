/** Where a command writes: results to `stdout`, progress, timing and errors to `stderr`. */
export interface CliStreams {
  readonly stdout: NodeJS.WritableStream;
  readonly stderr: NodeJS.WritableStream;
}

/** What every command gets beside its own arguments. */
export interface CommandContext extends CliStreams {
  /** Aborted by Ctrl-C. */
  readonly signal: AbortSignal;
}
