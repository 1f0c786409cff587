import { KvError, OutOfMemoryError } from '@kv/sparse-core';
import type { CommanderError } from 'commander';

import { formatBytes } from './format.js';

/** Errors that count bytes: of the device, and of the host. */
const places: Readonly<Record<string, string>> = { tensor: 'memory', bytes: 'host memory' };

/** An error of ours says all in its message, but for what a user of the command can do for memory. Any other is a defect, whose stack is wanted. */
export function describeError(error: Error): string {
  if (!(error instanceof KvError)) return `unexpected error; please report it.\n${error.stack ?? error.message}`;
  const { subject = '', given, wanted } = error;
  const place = places[subject];
  const isShortage = error instanceof OutOfMemoryError && place !== undefined && typeof given === 'number' && typeof wanted === 'number';
  if (!isShortage) return subject === 'chat_template' ? `${error.message} Leave out --chat.` : nameOptions(error.message);
  return (
    `There is no room for ${formatBytes(given)} more of ${place}: ${formatBytes(Math.max(0, wanted))} are left. ` +
    'Give a shorter text, fewer --max-new-tokens or requests, or a --policy that holds less.'
  );
}

/** What a user typed wrong, in one line that ends with where to look. */
export function describeUsageError({ code, message }: CommanderError, command: string | undefined): string {
  const [what, guess] = message.replace(/^error: /, '').split(/\n\((Did you mean .*\?)\)$/s);
  const isCommand = code !== 'commander.unknownCommand' && command !== undefined && !command.startsWith('-');
  const help = isCommand ? `kv ${command} --help lists its options.` : 'kv --help lists the commands.';
  return [what?.replace(/\.?$/, '.'), guess, help].filter(Boolean).join(' ');
}

/** Packages name a value as their functions have it: `sample: topP is 2`. A user of the command typed `--top-p`. */
function nameOptions(message: string): string {
  return message
    .replace(/^StopMatcher: stops(?= is )/, '--stop')
    .replace(/^setBudget: budgetTokens(?= is )/, '--budgets')
    .replace(/^(?:sample|calibration\.train): (\w+)(?= is )/, (_, name: string) => `--${name.replace(/[A-Z]/g, (capital) => `-${capital.toLowerCase()}`)}`);
}
