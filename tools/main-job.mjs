// The main job: questions about a long document, answered by the small model under every policy. Takes the
// options of `kv compare`; a --document of one's own wants a --question of one's own.
import { relative } from 'node:path';
import { fileURLToPath } from 'node:url';
import { runCli } from '../packages/cli/dist/index.js';

const model = relative(process.cwd(), fileURLToPath(new URL('../models/needle-8m', import.meta.url)));
const ours = `${model}/documents/constitution`;
const given = process.argv.slice(2);
const names = (option) => given.some((each) => each === option || each.startsWith(`${option}=`));

const document = names('--document') ? [] : ['--document', `${ours}/document.txt`];
const asksItsOwn = names('--document') || names('--question') || names('--questions');
const questions = asksItsOwn ? [] : ['--questions', `${ours}/questions.json`];
process.exitCode = await runCli(['compare', model, ...document, ...questions, ...given]);
