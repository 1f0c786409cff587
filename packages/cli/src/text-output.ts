import type { WriteStream } from 'node:tty';
import { stripVTControlCharacters } from 'node:util';

/** Writes text to a stream. Files and answers may hold anything; what would steer a terminal is made visible. */
export class TextOutput {
  readonly stream: NodeJS.WritableStream;

  constructor(stream: NodeJS.WritableStream) {
    this.stream = stream;
  }

  /** Whether a terminal shows what is written. */
  get isTerminal(): boolean {
    return (this.stream as Partial<WriteStream>).isTTY === true;
  }

  /** Writes text for people to read. */
  write(text: string): void {
    this.stream.write(visible(text));
  }

  /** Writes text of the command's own, styled with `styled`: in colour where the output shows colours. */
  writeStyled(text: string): void {
    this.stream.write(this.#hasColours ? text : stripVTControlCharacters(text));
  }

  /** Writes what was asked for, which programs read too: as it is, unless a terminal shows it. */
  writeResult(text: string): void {
    this.stream.write(this.isTerminal ? visible(text) : text);
  }

  /** Not where the user has set NO_COLOR. */
  get #hasColours(): boolean {
    return this.isTerminal && (this.stream as Partial<WriteStream>).hasColors?.() === true;
  }

  /** Waits until all that was written is out, or is known to be lost. */
  flush(): Promise<void> {
    return new Promise((resolve) => {
      // The stream's error event comes behind the call.
      this.stream.write('', () => setImmediate(resolve));
    });
  }
}

/** Control characters but for ends of lines and tabs, as `\x1b` and the like. */
function visible(text: string): string {
  return text.replace(/(?!\n|\t|\r\n)\p{Cc}/gu, (control) => `\\x${control.charCodeAt(0).toString(16).padStart(2, '0')}`);
}
