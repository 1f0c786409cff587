import { formatBytes } from '../format.js';
import { median } from './median.js';
import { bare, isRight } from './questions.js';
import type { Question } from './questions.js';
import type { PolicyRun } from './run-reading.js';

/** What the runs say to who has this text. */
export interface Advice {
  /** Undefined where the runs do not tell. */
  readonly run: PolicyRun | undefined;
  /** In one line. */
  readonly text: string;
}

/**
 * Of the policies that lose no answer of the first one, the one whose cache is smallest, on device and host. Where the right answer of a
 * question is not known, the first policy's is taken for it.
 */
export function advise(questions: readonly Question[], runs: readonly PolicyRun[]): Advice {
  const [reference] = runs;
  if (reference === undefined) throw new RangeError('There is no run to take advice from.');
  const wanted = questions.flatMap(({ answer }, index) => {
    const given = reference.answers[index]?.text ?? '';
    return answer === undefined || isRight(given, answer) ? [{ index, answer: bare(given) }] : [];
  });
  if (wanted.length === 0) {
    return { run: undefined, text: `Not even ${reference.policy} answers right: this text and model tell nothing.` };
  }
  const bytesOf = ({ answers }: PolicyRun): number => median(answers.map(({ kvBytes: { device, host } }) => device + host));
  const losesNone = runs.filter(({ answers }) =>
    wanted.every(({ index, answer }) => bare(answers[index]?.text ?? '') === answer),
  );
  const run = losesNone.reduce((best, each) => (bytesOf(each) < bytesOf(best) ? each : best), reference);
  if (run === reference) {
    const others = runs.some((each) => bytesOf(each) < bytesOf(reference)) ? 'every smaller cache loses answers' : 'no other cache is smaller';
    return { run, text: `Take ${run.policy}: ${others} on this text.` };
  }
  const saved = Math.round(100 * (1 - bytesOf(run) / bytesOf(reference)));
  const sizes = `${formatBytes(bytesOf(run))} instead of ${formatBytes(bytesOf(reference))}`;
  return { run, text: `Take ${run.policy}: no answer lost, ${sizes} (−${saved} %).` };
}
