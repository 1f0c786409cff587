import { KvError } from '@kv/sparse-core';
import { CommanderError } from 'commander';

import type { CliStreams } from './command-context.js';
import { createProgram } from './program.js';

const interruptedExitCode = 130;

/**
 * Runs the `kv` command. Ctrl-C aborts it in good order, a second one ends the process.
 * @param args what stands behind `kv`
 * @returns the exit code: 0; 1 for an error, which is written to `stderr`; 130 when interrupted
 */
export async function runCli(
  args: readonly string[],
  { stdout, stderr }: CliStreams = process,
): Promise<number> {
  const interruption = new AbortController();
  const interrupt = (): void => interruption.abort();
  process.once('SIGINT', interrupt);
  try {
    await createProgram({ stdout, stderr, signal: interruption.signal }).parseAsync(args, { from: 'user' });
    return 0;
  } catch (error) {
    // Commander has written its own message.
    if (error instanceof CommanderError) return error.exitCode;
    if (interruption.signal.aborted) {
      stderr.write('\nkv: interrupted\n');
      return interruptedExitCode;
    }
    stderr.write(`kv: ${describeError(error)}\n`);
    return 1;
  } finally {
    process.removeListener('SIGINT', interrupt);
  }
}

/** An error of ours says all in its message; any other is a defect, whose stack is wanted. */
function describeError(error: unknown): string {
  if (error instanceof KvError) return error.message;
  const detail = error instanceof Error ? (error.stack ?? error.message) : String(error);
  return `unexpected error; please report it.\n${detail}`;
}
