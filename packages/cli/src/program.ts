import { Command, Option } from 'commander';

import type { CommandContext } from './command-context.js';
import { bench, benchPolicies, benchRequests, mostAtOnce } from './commands/bench.js';
import type { BenchOptions } from './commands/bench.js';
import { calibrate } from './commands/calibrate.js';
import type { CalibrateOptions } from './commands/calibrate.js';
import { compare } from './commands/compare.js';
import type { CompareOptions } from './commands/compare.js';
import { doctor } from './commands/doctor.js';
import { generateText } from './commands/generate.js';
import type { GenerateTextOptions } from './commands/generate.js';
import { inspect } from './commands/inspect.js';
import { simulatedGpus, simulateServing } from './commands/simulate.js';
import type { SimulateOptions } from './commands/simulate.js';
import { deviceOptions, finiteNumber, someText, wholeNumber, wholeNumbers } from './options.js';
import { policies } from '@kv/policies';
import { figureNames, simulatedModels } from '@kv/serve-scheduler';
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
      // `runCli` writes the error that is thrown.
      outputError: () => undefined,
    })
    .addHelpText('after', '\nExample:\n  kv generate models/needle-8m --prompt "def read_lines(path):"\n\nkv COMMAND --help lists the options of a command.');
  addGenerate(program, context);
  addCompare(program, context);
  addBench(program, context);
  addCalibrate(program, context);
  addSimulate(program, context);
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

function addGenerate(program: Command, context: CommandContext): void {
  const command = program
    .command('generate')
    .usage('<model> --prompt <text> [options]')
    .description('answer a prompt: text to stdout as it comes, timing to stderr')
    .argument('<model>', modelArgument)
    .addOption(new Option('--prompt <text>', 'the prompt').argParser(someText).conflicts('promptFile'))
    .option('--prompt-file <file>', 'a file that holds the prompt')
    .option('--chat', "put the prompt into the model's chat template, as the user's message")
    .addOption(policyOption())
    .option('--max-new-tokens <count>', 'tokens of the longest answer', wholeNumber(1), 256)
    .option('--stop <text...>', 'texts that end the answer')
    .option('--temperature <number>', '0 takes the likeliest token', finiteNumber, 0)
    .option('--top-k <count>', 'choose among this many of the likeliest tokens', wholeNumber(1))
    .option('--top-p <share>', 'choose among the likeliest tokens of this total probability', finiteNumber)
    .option('--min-p <share>', "choose among tokens of at least this share of the likeliest's", finiteNumber)
    .option('--repetition-penalty <factor>', 'above 1 makes tokens that were there unlikelier', finiteNumber)
    .option('--seed <number>', 'the same seed gives the same answer', wholeNumber(0), 0);
  for (const option of deviceOptions()) command.addOption(option);
  command.action((model: string, options: GenerateTextOptions) => generateText(model, options, context));
}

function addCompare(program: Command, context: CommandContext): void {
  const command = program
    .command('compare')
    .usage('<model> --document <file> --question <text> [options]')
    .description('ask questions about a document under the best setting of each method: what each holds and still answers')
    .argument('<model>', modelArgument)
    .requiredOption('--document <file>', 'the text that the questions are about')
    .addOption(new Option('--question <text>', 'a question, answered in one line').argParser(someText).conflicts('questions'))
    .option('--questions <file>', 'a JSON list of { question, answer }')
    .option('--all', 'every setting of every method, chosen with the question in sight and without', false)
    .option('--max-new-tokens <count>', 'tokens of the longest answer', wholeNumber(1), 64);
  for (const option of deviceOptions()) command.addOption(option);
  command.action((model: string, options: CompareOptions) => compare(model, options, context));
}

function addBench(program: Command, context: CommandContext): void {
  const command = program
    .command('bench')
    .description('serve requests that come at once, under each policy: time to the first token, tokens a second, memory')
    .argument('<model>', modelArgument)
    .addOption(new Option('--policy <names...>', 'how prompts are read and what the cache keeps').choices(policies.map(({ name }) => name)).default(benchPolicies))
    .addOption(new Option('--requests <counts...>', 'how many come at once').argParser(wholeNumbers(1, mostAtOnce)).default(benchRequests))
    .option('--prompt-tokens <count>', 'random tokens of each prompt (default: 2048, and of examples 8192)', wholeNumber(1))
    .option('--answer-tokens <count>', 'tokens of each answer', wholeNumber(1), 64)
    .addOption(new Option('--budgets <counts...>', 'tokens that a step of an answer reads: asks held-out examples instead').argParser(wholeNumbers(1)).conflicts(['policy', 'requests', 'answerTokens', 'seed']))
    .option('--examples <count>', 'how many of each task are asked (default: 2)', wholeNumber(1))
    .option('--seed <number>', 'the same seed gives the same prompts', wholeNumber(0), 0)
    .option('--svg <file>', 'where the figures go, drawn')
    .option('--json', 'the figures as one JSON value', false);
  for (const option of deviceOptions()) command.addOption(option);
  command.action((model: string, options: BenchOptions) => bench(model, options, context));
}

function addCalibrate(program: Command, context: CommandContext): void {
  const command = program
    .command('calibrate')
    .usage('<model> --text <files...> --out <file> [options]')
    .description("train codebooks of a model's keys on texts, for caches that hold keys as codes")
    .argument('<model>', modelArgument)
    .requiredOption('--text <file...>', 'texts like those that the model will read; three of some thousand tokens will do')
    .requiredOption('--out <file>', 'where the codebooks go, as safetensors')
    .option('--groups <count>', 'codes of a key (default: half the dims of a head)', wholeNumber(1))
    .option('--centroids <count>', 'values of a code, at most 8192', wholeNumber(2), 8192)
    .option('--separate', 'a codebook for each group, instead of one that all groups of a head share', false)
    .option('--channel-scale', 'divide each dim by its root mean square first', false)
    .option('--iterations <count>', 'rounds of training, of 10,000 vectors each', wholeNumber(1), 200)
    .option('--seed <number>', 'the same seed and texts give the same codebooks', wholeNumber(0), 0);
  for (const option of deviceOptions()) command.addOption(option);
  command.action((model: string, options: CalibrateOptions) => calibrate(model, options, context));
}

function addSimulate(program: Command, context: CommandContext): void {
  const command = program
    .command('simulate')
    .description("serve requests on a clock of its own, by measured times of a GPU's kernels: SparseServe's figures")
    .addOption(new Option('--model <name>', 'whose shape it is').choices(Object.keys(simulatedModels)).default('lwm-7b'))
    .addOption(new Option('--figure <names...>', 'figures of the paper (default: all)').choices(figureNames).conflicts('trace'))
    .option('--trace <file>', 'serve the requests of a trace as Mooncake publishes them, under every system')
    .addOption(new Option('--gpu <name>', 'whose times they are: h200 as measured, or a100 as the paper has it (default: h200)').choices(Object.keys(simulatedGpus)))
    .option('--costs <file>', 'cost tables as JSON (default: those of --gpu)')
    .option('--requests <count>', 'requests of each run', wholeNumber(1), 100)
    .option('--answers <tokens>', 'tokens of each answer, or longbench for the limits of its tasks', '512')
    .option('--rates <count...>', 'requests a second (default: some below and above what the system without features serves)')
    .option('--seed <number>', 'the same seed gives the same numbers', wholeNumber(0), 1)
    .addOption(new Option('--svg <file>', 'where the figures go, drawn').conflicts('trace'))
    .option('--json', 'tables as one JSON value', false);
  command.action((options: SimulateOptions) => simulateServing(options, context));
}

function policyOption(): Option {
  const names = policies.map(({ name }) => name);
  return new Option('--policy <name>', 'how the prompt is read and what the cache keeps')
    .choices(names)
    .default('dense');
}
