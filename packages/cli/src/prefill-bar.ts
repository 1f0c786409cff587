import cliProgress from 'cli-progress';

import { formatCount, formatSeconds } from './format.js';
import type { TextOutput } from './text-output.js';

/** How often a line is written where nothing can be redrawn, in milliseconds. */
const lineInterval = 5000;

/** Shows how far the reading of prompts is: a bar on a terminal, a line now and then elsewhere. */
export class PrefillBar implements Disposable {
  readonly #display: TerminalBar | ProgressLines;

  constructor(output: TextOutput, label: string) {
    this.#display = output.isTerminal ? new TerminalBar(output.stream, label) : new ProgressLines(output, label);
  }

  /** @param total tokens that will be read in all */
  update(tokens: number, total: number): void {
    this.#display.update(tokens, total);
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

  constructor(stream: NodeJS.WritableStream, label: string) {
    this.#label = label;
    this.#bar = new cliProgress.SingleBar({
      stream,
      format: '{label} [{bar}] {percentage}% | {value}/{total} tokens | {duration_formatted}',
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
  #started: number | undefined;
  #nextLine = 0;
  #unwritten: string | undefined;

  constructor(output: TextOutput, label: string) {
    this.#output = output;
    this.#label = label;
  }

  update(tokens: number, total: number): void {
    const now = performance.now();
    this.#started ??= now;
    const percentage = Math.floor((100 * tokens) / total);
    const seconds = formatSeconds((now - this.#started) / 1000);
    this.#unwritten = `${this.#label}: ${formatCount(tokens)}/${formatCount(total)} tokens (${percentage}%), ${seconds}\n`;
    if (now < this.#nextLine) return;
    this.#nextLine = now + lineInterval;
    this.end();
  }

  end(): void {
    if (this.#unwritten !== undefined) this.#output.write(this.#unwritten);
    this.#unwritten = undefined;
  }
}
