import { expectThat, listOf } from '@kv/sparse-core/native';
import { CommanderError } from 'commander';

import { expectStreams } from './command-context.js';
import type { CliStreams } from './command-context.js';
import { describeError, describeUsageError } from './describe-error.js';
import { createProgram } from './program.js';
import { TextOutput } from './text-output.js';

const interruptedExitCode = 130;
const mostArguments = 65_536;

/**
 * Runs the `kv` command. Ctrl-C aborts it in good order, a second one ends the process. It also stops when its results
 * cannot be written; a reader such as `head` that has seen enough is no error.
 * @param args what stands behind `kv`
 * @returns the exit code: 0; 1 for an error, which is written to `stderr`; 130 when interrupted
 * @throws InvalidValueError when these are no texts, or no streams to write to
 */
export async function runCli(args: readonly string[], streams: CliStreams = process): Promise<number> {
  const given = listOf('runCli', 'args', args, mostArguments);
  for (const each of given) expectThat('runCli', 'args', each, typeof each === 'string', 'texts');
  expectStreams(streams);
  const [stdout, stderr] = [new TextOutput(streams.stdout), new TextOutput(streams.stderr)];
  const interruption = new AbortController();
  const { signal } = interruption;
  const interrupt = (): void => interruption.abort();
  let lost: NodeJS.ErrnoException | undefined;
  const lose = (error: NodeJS.ErrnoException): void => {
    lost ??= error;
    interruption.abort();
  };
  process.once('SIGINT', interrupt);
  streams.stdout.on('error', lose);
  // Progress and errors that nobody reads are no reason to stop.
  streams.stderr.on('error', ignore);
  try {
    const failure = await createProgram({ stdout, stderr, signal })
      .parseAsync(given, { from: 'user' })
      .then(() => undefined, asError);
    await stdout.flush();
    const { exitCode, message = '' } = conclude(failure, lost, signal.aborted, given[0]);
    stderr.write(message);
    return exitCode;
  } finally {
    await stderr.flush();
    process.removeListener('SIGINT', interrupt);
    streams.stdout.removeListener('error', lose);
    streams.stderr.removeListener('error', ignore);
  }
}

interface Conclusion {
  readonly exitCode: number;
  readonly message?: string | undefined;
}

function conclude(failure: Error | undefined, lost: NodeJS.ErrnoException | undefined, aborted: boolean, command: string | undefined): Conclusion {
  if (lost?.code === 'EPIPE') return { exitCode: 0 };
  if (lost !== undefined) {
    return { exitCode: 1, message: `kv: The results cannot be written (${lost.message}). Make room, or write elsewhere.\n` };
  }
  if (failure === undefined) return { exitCode: 0 };
  if (failure instanceof CommanderError) {
    // Help and the version have been written.
    const isAnswered = failure.exitCode === 0 || failure.code === 'commander.help';
    return { exitCode: failure.exitCode, message: isAnswered ? '' : `kv: ${describeUsageError(failure, command)}\n` };
  }
  if (aborted) return { exitCode: interruptedExitCode, message: '\nkv: interrupted\n' };
  return { exitCode: 1, message: `kv: ${describeError(failure)}\n` };
}

function asError(thrown: unknown): Error {
  return thrown instanceof Error ? thrown : new Error(String(thrown));
}

function ignore(): void {
  // An error event without a listener would end the process.
}
