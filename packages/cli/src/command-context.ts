import type { CliStreams } from './run-cli.js';

/** What every command gets beside its own arguments. */
export interface CommandContext extends CliStreams {
  /** Aborted by Ctrl-C. */
  readonly signal: AbortSignal;
}
