import { once } from 'node:events';
import { rename } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { PassThrough, Writable } from 'node:stream';
import { WriteStream } from 'node:tty';

import { describe, expect, it } from 'vitest';

import { styled } from './format.js';
import { runCli } from './run-cli.js';
import { passKeyFile, passKeyQuestion } from './testing/pass-key-document.js';
import { needleModel, runKv, temporaryFile } from './testing/run-kv.js';
import { TextOutput } from './text-output.js';

/** A stream that takes some writes and fails all others, as a full disk or a closed pipe does. */
class Failing extends Writable {
  readonly written: string[] = [];
  #taken: number;

  constructor(
    readonly code: string,
    taken: number,
  ) {
    super({ decodeStrings: false });
    this.#taken = taken;
  }

  override _write(chunk: string, _encoding: string, done: (error?: Error) => void): void {
    this.#taken -= 1;
    if (this.#taken < 0) {
      done(Object.assign(new Error(`${this.code}: write`), { code: this.code }));
      return;
    }
    this.written.push(chunk);
    done();
  }
}

function collecting(): { readonly stream: PassThrough; readonly text: () => string } {
  const stream = new PassThrough();
  let all = '';
  stream.on('data', (chunk: Buffer) => (all += chunk.toString()));
  return { stream, text: () => all };
}

const longAnswer = ['generate', needleModel, '--prompt', 'import ', '--temperature', '1', '--max-new-tokens', '4000'];

describe('an output that fails', () => {
  it.each([['inspect', needleModel], longAnswer])('is an error where it is full: %s', async (...args) => {
    const stderr = collecting();
    const exitCode = await runCli(args, { stdout: new Failing('ENOSPC', 0), stderr: stderr.stream });
    expect(exitCode).toBe(1);
    expect(stderr.text()).toMatch(/^kv: The results cannot be written \(ENOSPC: write\)\..*\n$/m);
    expect(stderr.text()).not.toMatch(/^ {4}at /m);
  });

  it('ends the command without a word where its reader has left', async () => {
    const [stdout, stderr] = [new Failing('EPIPE', 3), collecting()];
    const exitCode = await runCli(longAnswer, { stdout, stderr: stderr.stream });
    expect({ exitCode, written: stdout.written.length }).toEqual({ exitCode: 0, written: 3 });
    expect(stderr.text()).not.toContain('kv:');
    // The answer was not computed to its end.
    expect(stderr.text()).not.toContain('answer:');
  });

  it('changes no result where it is only that of progress', async () => {
    const stdout = collecting();
    const exitCode = await runCli(['inspect', needleModel], { stdout: stdout.stream, stderr: new Failing('EPIPE', 0) });
    expect({ exitCode, stdout: stdout.text() }).toEqual(await runKv('inspect', needleModel).then(({ exitCode, stdout }) => ({ exitCode, stdout })));
    const args = ['generate', needleModel, '--prompt', 'import ', '--max-new-tokens', '4'];
    expect(await runCli(args, { stdout: collecting().stream, stderr: new Failing('ENOSPC', 0) })).toBe(0);
  });
});

describe('escape sequences', () => {
  const clear = '\x1b[2J\x9b1mred\x07\r';
  const shown = '\\x1b[2J\\x9b1mred\\x07\\x0d';

  it('of a model directory are shown, not obeyed', async () => {
    const config = await temporaryFile('config.json', JSON.stringify({ model_type: `llama${clear}` }));
    const { exitCode, stderr } = await runKv('inspect', dirname(config));
    expect(exitCode).toBe(1);
    expect(stderr).toContain('llama');
    expect(stderr).not.toMatch(/(?!\n)\p{Cc}/u);
  });

  it("of a file's name and of a question are shown, not obeyed", async () => {
    const file = await passKeyFile(1);
    const document = join(dirname(file), `document${clear}.txt`);
    await rename(file, document);
    const args = ['--document', document, '--question', `${clear}${passKeyQuestion}`];
    const { exitCode, stdout } = await runKv('compare', needleModel, ...args);
    expect(exitCode).toBe(0);
    expect(stdout).toContain(`document${shown}.txt`);
    expect(stdout).toContain(`${shown}${passKeyQuestion}`);
    expect(stdout).not.toMatch(/(?!\n)\p{Cc}/u);
  });

  it('of an answer reach a file as they are, and a terminal visibly', async () => {
    for (const [isTTY, wanted] of [
      [false, `${clear}\tand\r\n`],
      [true, `${shown}\tand\r\n`],
    ] as const) {
      const stream = Object.assign(new PassThrough(), { isTTY });
      const data = once(stream, 'data');
      new TextOutput(stream).writeResult(`${clear}\tand\r\n`);
      expect(String((await data)[0])).toBe(wanted);
    }
  });
});

describe('styles', () => {
  const text = `${styled('green', '✓')} right`;

  async function written(terminal: object): Promise<string> {
    const stream = Object.assign(new PassThrough(), terminal);
    const data = once(stream, 'data');
    new TextOutput(stream).writeStyled(text);
    return String((await data)[0]);
  }

  /** A terminal that decides as Node's own do, in this environment. */
  const terminal = (environment: object) => ({
    isTTY: true,
    hasColors: () => WriteStream.prototype.hasColors({ TERM: 'xterm-256color', ...environment }),
  });

  it('are shown by a terminal, and by nothing else', async () => {
    expect(await written(terminal({}))).toBe('\x1b[32m✓\x1b[39m right');
    expect(await written({})).toBe('✓ right');
    expect(await written(terminal({ TERM: 'dumb' }))).toBe('✓ right');
  });

  it('are left out where NO_COLOR is set', async () => {
    expect(await written(terminal({ NO_COLOR: '1' }))).toBe('✓ right');
  });
});

describe('a document without an end', () => {
  it('is read to a limit, and refused', async () => {
    const [before, computed] = [process.memoryUsage.rss(), process.cpuUsage()];
    const { exitCode, stdout, stderr } = await runKv('compare', needleModel, '--document', '/dev/zero', '--question', 'Why?');
    expect({ exitCode, stdout }).toEqual({ exitCode: 1, stdout: '' });
    expect(stderr).toBe('kv: The document /dev/zero has more than 64.0 MiB; give a shorter one.\n');
    const { user, system } = process.cpuUsage(computed);
    expect((user + system) / 1e6).toBeLessThan(20);
    // The text in pieces and as a whole.
    expect(process.memoryUsage.rss() - before).toBeLessThan(256 * 2 ** 20);
  });

  it('is no list of questions either', async () => {
    const [document, questions] = [await passKeyFile(), await temporaryFile('questions.json', `[${'1,'.repeat(2 ** 20)}1]`)];
    const { exitCode, stderr } = await runKv('compare', needleModel, '--document', document, '--questions', questions);
    expect(exitCode).toBe(1);
    expect(stderr).toMatch(/^kv: The list of questions \S+ has more than 1\.0 MiB; give a shorter one\.\n$/);
  });

  it.each([['generate', '--prompt-file'], ['compare', '--question', 'Why?', '--document']])('may be no folder either: %s', async (command, ...options) => {
    const { exitCode, stderr } = await runKv(command, needleModel, ...options, needleModel);
    expect(exitCode).toBe(1);
    expect(stderr).toMatch(/^kv: The (prompt|document) .* cannot be read \(EISDIR.*\)\. Check the path\.\n$/);
  });
});
