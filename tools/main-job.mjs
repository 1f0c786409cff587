// The main job: questions about a long document, answered by the small model under the best policy of each method. Takes
// the options of `kv compare`; a --document of one's own wants a --question of one's own.
import { relative } from 'node:path';
import { fileURLToPath } from 'node:url';
import { runCli } from '../packages/cli/dist/index.js';

/** @returns the exit code */
export function runMainJob(given, streams = process) {
  const model = relative(process.cwd(), fileURLToPath(new URL('../models/needle-8m', import.meta.url)));
  const ours = `${model}/documents/constitution`;
  const names = (option) => given.some((each) => each === option || each.startsWith(`${option}=`));

  const document = names('--document') ? [] : ['--document', `${ours}/document.txt`];
  const asksItsOwn = names('--document') || names('--question') || names('--questions');
  const questions = asksItsOwn ? [] : ['--questions', `${ours}/questions.json`];
  return runCli(['compare', model, ...document, ...questions, ...given], streams);
}

if (process.argv[1] === fileURLToPath(import.meta.url)) process.exitCode = await runMainJob(process.argv.slice(2));
