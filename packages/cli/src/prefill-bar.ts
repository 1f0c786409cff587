import cliProgress from 'cli-progress';

/** How often a line is written where nothing can be redrawn, in milliseconds. */
const lineInterval = 5000;

/** Shows how far the reading of prompts is: a bar on a terminal, a line now and then elsewhere. */
export class PrefillBar implements Disposable {
  readonly #bar: cliProgress.SingleBar;
  readonly #label: string;

  constructor(stream: NodeJS.WritableStream, label: string) {
    this.#label = label;
    this.#bar = new cliProgress.SingleBar({
      stream,
      format: '{label} [{bar}] {percentage}% | {value}/{total} tokens | {duration_formatted}',
      formatValue: (value, _options, type) =>
        type === 'value' || type === 'total' ? value.toLocaleString('en-US') : String(value),
      barCompleteChar: '█',
      barIncompleteChar: '░',
      barsize: 30,
      noTTYOutput: true,
      notTTYSchedule: lineInterval,
    });
  }

  /** @param total tokens that will be read in all */
  update(tokens: number, total: number): void {
    if (this.#bar.isActive) this.#bar.update(tokens);
    else this.#bar.start(total, tokens, { label: this.#label });
  }

  /** Ends the bar where it is; what is written next stands below it. */
  dispose(): void {
    if (this.#bar.isActive) this.#bar.stop();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}
