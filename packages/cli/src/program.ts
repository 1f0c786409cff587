import { Command } from 'commander';

import type { CommandContext } from './command-context.js';
import { doctor } from './commands/doctor.js';
import { inspect } from './commands/inspect.js';
import { version } from './version.js';

const modelArgument = 'a Hugging Face directory: config.json, tokenizer.json, *.safetensors';

/** The command line of `kv`. */
export function createProgram(context: CommandContext): Command {
  const program = new Command('kv')
    .description('Run long-context models from Node.js.')
    .version(version)
    .exitOverride()
    .configureOutput({
      writeOut: (text) => context.stdout.write(text),
      writeErr: (text) => context.stderr.write(text),
    });
  program
    .command('inspect')
    .description('say what a model is: family, sizes, weights, bytes of cache')
    .argument('<model>', modelArgument)
    .action((model: string) => inspect(model, context));
  program
    .command('doctor')
    .description('say what was built, what this machine has, and whether they work together')
    .action(() => doctor(context));
  return program;
}
