import { execFile, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { mkdtemp, rm } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout } from 'node:timers/promises';
import { promisify } from 'node:util';

import { CapabilityError, ModelFormatError } from '@kv/sparse-core';
import { withDirectory } from '@kv/sparse-core/testing';
import { afterAll, beforeEach, describe, expect, it } from 'vitest';

import { largeTokenizer } from '../testing/large-tokenizer.js';
import { needleModel } from '../testing/paths.js';
import { computingTime } from './computing-time.js';
import { tokenizerLimits } from './tokenizer-limits.js';
import { tokenizerProgram } from './tokenizer-program.js';
import { Tokenizer } from './tokenizer.js';

const definition = JSON.parse(readFileSync(join(needleModel, 'tokenizer.json'), 'utf8')) as Record<string, unknown>;
const messages = [{ role: 'user', content: 'Hi' }];
/** Backtracks 2^n times on n letters. */
const endless = { type: 'Split', pattern: { Regex: '(?:a|a)*b' }, behavior: 'Isolated', invert: false };
const letters = 'a'.repeat(60);

const limitsOfProduct = { ...tokenizerLimits };

beforeEach(() => {
  // The limits of the product are for slow machines: tests need not wait for them. Tests may run on a busy one.
  const limits = { milliseconds: 1000, millisecondsPerByte: 0, waitingFactor: 100, heapMegabytes: 128 };
  Object.assign(tokenizerLimits, limitsOfProduct, limits);
});

afterAll(() => {
  // Other files of tests run in this process.
  Object.assign(tokenizerLimits, limitsOfProduct);
});

function withTokenizer<Result>(
  changes: object,
  template: string,
  use: (tokenizer: Tokenizer) => Promise<Result>,
): Promise<Result> {
  const files = { 'tokenizer.json': JSON.stringify({ ...definition, ...changes }), 'chat_template.jinja': template };
  return withDirectory(files, async (directory) => {
    using tokenizer = await Tokenizer.open(directory);
    return await use(tokenizer);
  });
}

const parentOf = (id: string): number => {
  try {
    return Number(/\) \S+ (\d+)/.exec(readFileSync(`/proc/${id}/stat`, 'utf8'))?.[1]);
  } catch {
    return NaN;
  }
};
const children = (): string[] => readdirSync('/proc').filter((id) => parentOf(id) === process.pid);

/** Milliseconds that `work` takes of this process's threads. */
async function computingOf(work: () => Promise<unknown>): Promise<number> {
  const before = process.cpuUsage();
  await work();
  const { user, system } = process.cpuUsage(before);
  return (user + system) / 1000;
}

describe('a chat template', () => {
  const double = (count: number): string =>
    `{% set ns = namespace(x='a a a a ') %}{% for i in range(${count}) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}`;
  it.each([
    ['a range without end', '{{ range(1000000000000) }}'],
    ['a loop without end', '{% for i in range(900000) %}{% for j in range(900000) %}{% endfor %}{% endfor %}'],
    ['a text of 500 MB', "{{ 'a\nb\n' | indent(500000000) | upper }}"],
    ['a text that doubles', `${double(25)}{{ ns.x | upper | length }}`],
    ['a list of 134 million words', `${double(25)}{{ ns.x.split(' ') | length }}`],
  ])('of %s ends in an error, and the next call is answered', async (_name, loop) => {
    const template = `{% if wanted %}${loop}{% else %}{{ messages[0].content }}{% endif %}`;
    await withTokenizer({}, template, async (tokenizer) => {
      const computing = await computingOf(async () => {
        await expect(tokenizer.renderChat(messages, { variables: { wanted: true } })).rejects.toThrow(ModelFormatError);
      });
      expect(computing).toBeLessThan(1000);
      expect(await tokenizer.renderChat(messages)).toBe('Hi');
    });
  });

  it('is ended by an abort', async () => {
    const template = '{% for i in range(900000) %}{% for j in range(900) %}{% endfor %}{% endfor %}';
    await withTokenizer({}, template, async (tokenizer) => {
      const signal = AbortSignal.timeout(200);
      await expect(tokenizer.renderChat(messages, { signal })).rejects.toThrow(signal.reason as Error);
      expect(tokenizer.decode(await tokenizer.encode('Hi'))).toBe('Hi');
    });
  });
});

describe('a regular expression that backtracks without end', () => {
  it('ends the text in an error, and the next one is answered', async () => {
    await withTokenizer({ pre_tokenizer: endless }, '', async (tokenizer) => {
      await expect(tokenizer.encode(letters)).rejects.toThrow(ModelFormatError);
      await expect(tokenizer.encode(letters)).rejects.toThrow(/tokenizing 60 characters took more than 2 s of computing/);
      expect((await tokenizer.encode('b')).length).toBeGreaterThan(0);
    });
  });

  it('is ended by an abort, and a text that waits behind it is answered', async () => {
    await withTokenizer({ pre_tokenizer: endless }, '', async (tokenizer) => {
      const controller = new AbortController();
      const first = tokenizer.encode(letters, { signal: controller.signal });
      const second = tokenizer.encode('b');
      await setTimeout(100);
      controller.abort();
      await expect(first).rejects.toThrow('aborted');
      expect(await second).toEqual(await tokenizer.encode('b'));
    });
  });

  it('that is aborted when its answer is on the way leaves others their own', async () => {
    await withTokenizer({}, '', async (tokenizer) => {
      const controller = new AbortController();
      const first = tokenizer.encode('first', { signal: controller.signal });
      const others = ['second', 'third'].map((text) => tokenizer.encode(text));
      // The text is sent in one of these turns; its answer comes while this thread is busy, longer than another process is waited for.
      for (let turn = 0; turn < 20; turn++) await Promise.resolve();
      controller.abort();
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 500);
      await expect(first).rejects.toThrow('aborted');
      expect((await Promise.all(others)).map((ids) => tokenizer.decode(ids))).toEqual(['second', 'third']);
    });
  });

  it('leaves a text that waits when that one is aborted', async () => {
    await withTokenizer({}, '', async (tokenizer) => {
      const controller = new AbortController();
      const first = tokenizer.encode('first');
      const second = tokenizer.encode('second', { signal: controller.signal });
      controller.abort();
      await expect(second).rejects.toThrow('aborted');
      expect(tokenizer.decode(await first)).toBe('first');
    });
  });

  it.each([
    ['normalizer', { type: 'Replace', pattern: endless.pattern, content: '' }],
    ['decoder', { type: 'Replace', pattern: endless.pattern, content: '' }],
  ])('in a %s meets tokens when the tokenizer is opened', async (part, stage) => {
    const added_tokens = [{ id: 4096, content: letters, special: false, normalized: true }];
    await expect(withTokenizer({ [part]: stage, added_tokens }, '', () => Promise.resolve())).rejects.toThrow(
      /opening it took more than 1 s of computing/,
    );
  });
});

describe('a tokenizer.json', () => {
  const model = definition.model as { vocab: Record<string, number>; merges: unknown[] };
  const grow = { type: 'Replace', pattern: { String: '' }, content: 'x'.repeat(1000) };
  const single = [{ SpecialToken: { id: '<|none|>', type_id: 0 } }, { Sequence: { id: 'A', type_id: 0 } }];
  const post_processor = { type: 'TemplateProcessing', single, pair: single, special_tokens: {} };
  const cases: [string, object, typeof ModelFormatError | typeof CapabilityError][] = [
    ['whose normalizer multiplies a text', { normalizer: { type: 'Sequence', normalizers: Array(9).fill(grow) } }, ModelFormatError],
    ['whose pieces have no end', { pre_tokenizer: { type: 'FixedLength', length: 0 } }, ModelFormatError],
    ['with an id that is no number', { model: { ...model, vocab: { ...model.vocab, a: 'b' } } }, ModelFormatError],
    ['with an id of 2^32', { model: { ...model, vocab: { ...model.vocab, a: 2 ** 32 } } }, ModelFormatError],
    ['with a template of a token that has no id', { post_processor }, ModelFormatError],
    ['with a decoder of words', { decoder: { type: 'WordPiece', prefix: '##' } }, CapabilityError],
  ];
  it.each(cases)('%s is refused, or its text', async (_name, changes, wanted) => {
    const encoded = withTokenizer(changes, '', (tokenizer) => tokenizer.encode('Hi'));
    await expect(encoded).rejects.toThrow(wanted);
  });

  it('of 128K tokens keeps this thread free, as do texts of 16K characters', async () => {
    const text = readFileSync(join(needleModel, 'documents/constitution/document.txt'), 'utf8').slice(0, 16_384);
    // In a process of its own: the more memory a process has, the longer it takes to start another, and other tests leave theirs behind.
    const program = `
      import { readFileSync } from 'node:fs';
      import { Tokenizer as Library } from '@huggingface/tokenizers';
      import { Tokenizer } from '@kv/model';
      const directory = process.argv[1];
      const texts = ${JSON.stringify([text, 'abcdefghij'.repeat(1638)])};
      const milliseconds = { opening: [], encoding: [] };
      async function measure(what, work) {
        const before = process.cpuUsage();
        const result = await work();
        const { user, system } = process.cpuUsage(before);
        milliseconds[what].push((user + system) / 1000);
        return result;
      }
      const tokenizer = await measure('opening', () => Tokenizer.open(directory));
      const [ids] = await measure('encoding', () => Promise.all(texts.map((text) => tokenizer.encode(text))));
      if (tokenizer.decode(ids) !== texts[0]) throw new Error('the ids are not those of the text');
      const library = await measure('opening', () => new Library(JSON.parse(readFileSync(directory + '/tokenizer.json', 'utf8')), {}));
      await measure('encoding', () => texts.map((text) => library.encode(text)));
      console.log(JSON.stringify(milliseconds));`;
    const files = { 'tokenizer.json': JSON.stringify(largeTokenizer(128_000)) };
    const { stdout } = await withDirectory(files, (directory) =>
      promisify(execFile)(process.execPath, ['--input-type=module', '--eval', program, directory], { cwd: import.meta.dirname }),
    );
    const { opening, encoding } = JSON.parse(stdout) as Record<'opening' | 'encoding', [number, number]>;
    const shown = ([ours, library]: [number, number]): string => `${ours.toFixed(0)} ms of computing, by the library alone ${library.toFixed(0)} ms`;
    console.log(`opening 128K tokens: ${shown(opening)}; encoding: ${shown(encoding)}`);
    expect(opening[0]).toBeLessThan(Math.min(150, opening[1] / 5));
    expect(encoding[0]).toBeLessThan(Math.min(50, encoding[1] / 5));
  });
});

describe.skipIf(process.platform !== 'linux')('a process that waits for its turn on a busy machine', () => {
  /** Opens a tokenizer, stops its process as a machine without a free core would, and asks within these limits. */
  const askStopped = async (
    limits: Partial<typeof tokenizerLimits>,
    use: (answer: Promise<Int32Array>, goOn: () => void) => Promise<void>,
  ): Promise<void> => {
    const others = new Set(children());
    await withTokenizer({}, '', async (tokenizer) => {
      const pid = Number(children().find((id) => !others.has(id)));
      process.kill(pid, 'SIGSTOP');
      Object.assign(tokenizerLimits, limits);
      await use(tokenizer.encode('b'), () => process.kill(pid, 'SIGCONT'));
    });
  };

  it('has its time of computing', () =>
    askStopped({ milliseconds: 100, waitingFactor: 1000 }, async (answer, goOn) => {
      await setTimeout(400);
      goOn();
      expect((await answer).length).toBeGreaterThan(0);
    }));

  it('is not waited for without end', () =>
    askStopped({ milliseconds: 100, waitingFactor: 4 }, async (answer) => {
      await expect(answer).rejects.toThrow(/took more than 1 s; wanted at most 1 s/);
    }));

  it('has computed what it says itself', () => {
    const { user, system } = process.cpuUsage();
    const seen = computingTime(process.pid) ?? NaN;
    const later = process.cpuUsage();
    // Each of the two counts of ticks leaves out part of one.
    expect(seen).toBeGreaterThan((user + system) / 1000 - 20);
    expect(seen).toBeLessThanOrEqual((later.user + later.system) / 1000 + 20);
    expect(computingTime(undefined)).toBeUndefined();
  });
});

it.skipIf(process.platform !== 'linux')('an abort leaves the process of a tokenizer that is done soon', async () => {
  const others = new Set(children());
  await withTokenizer({}, '', async (tokenizer) => {
    const started = children().filter((id) => !others.has(id));
    let kept = 0;
    for (let text = 0; text < 10; text++) {
      const controller = new AbortController();
      const aborted = tokenizer.encode('first', { signal: controller.signal });
      // It is sent in one of these turns.
      for (let turn = 0; turn < 20; turn++) await Promise.resolve();
      controller.abort();
      await expect(aborted).rejects.toThrow('aborted');
      expect(tokenizer.decode(await tokenizer.encode('second'))).toBe('second');
      if (started.every((id) => children().includes(id))) kept += 1;
    }
    // On a busy machine the process may not get its turn in time.
    expect(kept).toBeGreaterThan(0);
  });
});

it.skipIf(process.platform !== 'linux')('an idle tokenizer neither keeps the process alive nor outlives it', async () => {
  const program = `
    import { readdirSync, readFileSync } from 'node:fs';
    import { Tokenizer } from '@kv/model';
    const tokenizer = await Tokenizer.open(${JSON.stringify(needleModel)});
    await tokenizer.encode('x');
    const parentOf = (id) => Number(readFileSync('/proc/' + id + '/stat', 'utf8').split(') ')[1].split(' ')[1]);
    const isChild = (id) => { try { return parentOf(id) === process.pid; } catch { return false; } };
    console.log(readdirSync('/proc').filter((name) => /^[0-9]+$/.test(name)).filter(isChild).join());`;
  const options = { encoding: 'utf8', cwd: import.meta.dirname } as const;
  const child = execFileSync(process.execPath, ['--input-type=module', '--eval', program], options).trim();
  expect(child).toMatch(/^[0-9]+$/);
  while (existsSync(`/proc/${child}`)) await setTimeout(10);
});

it.skipIf(process.platform !== 'linux')('a tokenizer that does not end outlives a killed parent by no more than its time', async () => {
  // Starts what is given on standard input, sets it to work, and says which process it is once that is at work.
  const parent = `
    const { program, requests } = JSON.parse(require('node:fs').readFileSync(0, 'utf8'));
    const child = require('node:child_process').spawn(process.execPath, ['--eval', program], { stdio: ['ignore', 'ignore', 'ignore', 'ipc'], detached: true });
    for (const request of requests) child.send(request);
    child.once('message', () => setTimeout(() => console.log(String(child.pid)), 200));`;
  const directory = await mkdtemp(join(tmpdir(), 'kv-orphan-'));
  const definitionFile = join(directory, 'tokenizer.json');
  writeFileSync(definitionFile, JSON.stringify({ ...definition, pre_tokenizer: endless }));
  const { resolve } = createRequire(import.meta.url);
  const libraries = { tokenizers: resolve('@huggingface/tokenizers'), jinja: resolve('@huggingface/jinja') };
  const requests = [
    { operation: 'open', argument: { definitionFile, settings: '{}', template: null, ...libraries }, milliseconds: 60_000 },
    { operation: 'encode', argument: { text: letters, addSpecialTokens: true }, milliseconds: 3000 },
  ];
  const starting = spawn(process.execPath, ['--eval', parent], { stdio: ['pipe', 'pipe', 'inherit'] });
  starting.stdin.end(JSON.stringify({ program: tokenizerProgram, requests }));
  const [pid] = (await once(starting.stdout, 'data')) as [Buffer];
  starting.kill('SIGKILL');
  const child = `/proc/${pid.toString().trim()}`;
  expect(existsSync(child)).toBe(true);
  while (existsSync(child)) await setTimeout(10);
  await rm(directory, { recursive: true });
});
