import cliProgress from 'cli-progress';

import { formatCount, formatSeconds } from './format.js';
import type { TextOutput } from './text-output.js';

/** How often a line is written where nothing can be redrawn, in milliseconds. */
const lineInterval = 5000;

/** Shows how far the reading of prompts, or other work of that kind, is: a bar on a terminal, a line now and then elsewhere. */
export class PrefillBar implements Disposable {
  readonly #display: TerminalBar | ProgressLines;

  constructor(output: TextOutput, label: string, unit = 'tokens') {
    const Display = output.isTerminal ? TerminalBar : ProgressLines;
    this.#display = new Display(output, label, unit);
  }

  /** @param total what will be done in all */
  update(done: number, total: number): void {
    this.#display.update(done, total);
  }

  /** Ends the bar where it is; what is written next stands below it. */
  dispose(): void {
    this.#display.end();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}

class TerminalBar {
  readonly #bar: cliProgress.SingleBar;
  readonly #label: string;

  constructor({ stream }: TextOutput, label: string, unit: string) {
    this.#label = label;
    this.#bar = new cliProgress.SingleBar({
      stream,
      format: `{label} [{bar}] {percentage}% | {value}/{total} ${unit} | {duration_formatted}`,
      formatValue: (value, _options, type) => (type === 'value' || type === 'total' ? formatCount(value) : String(value)),
      barCompleteChar: '█',
      barIncompleteChar: '░',
      barsize: 12,
    });
  }

  update(tokens: number, total: number): void {
    if (this.#bar.isActive) this.#bar.update(tokens);
    else this.#bar.start(total, tokens, { label: this.#label });
  }

  end(): void {
    if (this.#bar.isActive) this.#bar.stop();
  }
}

/** The first state and the last one are written, and those between after an interval. */
class ProgressLines {
  readonly #output: TextOutput;
  readonly #label: string;
  readonly #unit: string;
  readonly #started = performance.now();
  #nextLine = 0;
  #unwritten: string | undefined;

  constructor(output: TextOutput, label: string, unit: string) {
    this.#output = output;
    this.#label = label;
    this.#unit = unit;
  }

  update(tokens: number, total: number): void {
    const now = performance.now();
    const percentage = Math.floor((100 * tokens) / total);
    const seconds = formatSeconds((now - this.#started) / 1000);
    this.#unwritten = `${this.#label}: ${formatCount(tokens)}/${formatCount(total)} ${this.#unit} (${percentage}%), ${seconds}\n`;
    if (now < this.#nextLine) return;
    this.#nextLine = now + lineInterval;
    this.end();
  }

  end(): void {
    if (this.#unwritten !== undefined) this.#output.write(this.#unwritten);
    this.#unwritten = undefined;
  }
}
