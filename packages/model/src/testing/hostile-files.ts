import { rawFile } from '@kv/sparse-core/testing';
import { randomNumbers } from './random-model.js';

/** A directory's files by name: contents, or what no regular file is. */
export type HostileFiles = Record<string, Uint8Array | string | OddFile>;
export interface OddFile { readonly odd: 'directory' | 'fifo' | 'loop' | 'endless' | 'unreadable' }

export interface Mutation {
  readonly name: string;
  /** How many of 100 tries are of this kind. */
  readonly share: number;
  readonly mutate: (files: HostileFiles, random: Random) => void;
}

/** Choices, the same for the same seed. */
export class Random {
  readonly #next: () => number;

  constructor(seed: number) {
    this.#next = randomNumbers(seed);
  }

  /** A whole number from 0 to `end - 1`. */
  below(end: number): number {
    return Math.floor(((this.#next() + 1) / 2) * end);
  }

  of<Kind>(choices: readonly Kind[]): Kind {
    return choices[this.below(choices.length)] as Kind;
  }
}

const junk = (random: Random): unknown =>
  random.of<() => unknown>([
    () => random.of([0, -1, 1.5, 1e308, -1e-308, 2 ** 31, 2 ** 32, 2 ** 53, random.below(400)]),
    () => random.of([null, true, false, '', '\0', '../x', 'toString', '__proto__', '\u001b[2J', 'x'.repeat(1e6)]),
    () => random.of([[], {}, [[]], [0], ['a', 'b'], { length: 5e8 }, { type: 'Sequence' }]),
    () => nested(random.of([10, 100, 10_000]), random.of(['array', 'object'])),
    () => Array.from({ length: random.of([10, 10_000]) }, () => 0),
  ])();

function nested(depth: number, kind: 'array' | 'object'): unknown {
  let value: unknown = 0;
  for (let level = 0; level < depth; level += 1) value = kind === 'array' ? [value] : { a: value };
  return value;
}

/** JSON text of any depth, which JSON.stringify does not give. */
function stringify(value: unknown): string {
  try {
    return JSON.stringify(value);
  } catch {
    return '['.repeat(1e5) + ']'.repeat(1e5);
  }
}

const textOf = (files: HostileFiles, name: string): string => {
  const content = files[name];
  return typeof content === 'string' ? content : new TextDecoder().decode(content as Uint8Array);
};

/** Replaces, removes or copies a value at a random place of a JSON value. */
function mutateJson(root: unknown, random: Random): unknown {
  if (typeof root !== 'object' || root === null || random.below(12) === 0) return junk(random);
  const keys = Object.keys(root);
  const key = keys[random.below(keys.length)];
  if (key === undefined) return junk(random);
  const record = root as Record<string, unknown>;
  const change = random.below(8);
  // An array's length is no value of JSON.
  const names = ['type', 'model', 'a', '__proto__', ...(Array.isArray(root) ? [] : ['length'])];
  if (change === 0) Reflect.deleteProperty(record, key);
  else if (change === 1) record[random.of(keys)] = record[key];
  else if (change === 2) record[random.of(names)] = junk(random);
  else record[key] = mutateJson(record[key], random);
  return record;
}

function mutateBytes(bytes: Uint8Array, random: Random, end = bytes.length): Uint8Array {
  const copy = bytes.slice();
  for (let edits = 1 + random.below(4); edits > 0 && end > 0; edits -= 1) {
    const at = random.below(end);
    copy[at] = random.of([(copy[at] ?? 0) ^ (1 << random.below(8)), random.below(256), 0x22, 0x7b, 0xff]);
  }
  return copy;
}

function splitWeights(bytes: Uint8Array): { header: string; data: Uint8Array } {
  const end = 8 + Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  return { header: new TextDecoder().decode(bytes.subarray(8, end)), data: bytes.subarray(end) };
}

function mutateHeader(files: HostileFiles, random: Random, change: (header: string) => string): void {
  const name = random.of(Object.keys(files).filter((each) => each.endsWith('.safetensors')));
  const { header, data } = splitWeights(files[name] as Uint8Array);
  files[name] = rawFile(change(header), data);
}

const replaceOne = (text: string, pattern: RegExp, random: Random, by: string): string => {
  const matches = Array.from(text.matchAll(pattern));
  const match = matches[random.below(matches.length)];
  return match === undefined ? text : text.slice(0, match.index) + by + text.slice(match.index + match[0].length);
};

const dtypes = ['BOOL', 'U8', 'I8', 'F8_E5M2', 'I16', 'F16', 'BF16', 'I32', 'U32', 'F32', 'I64', 'F64', 'F7', ''];
const counts = ['-1', '0', '1.5', '2147483648', '4294967296', '9007199254740993', '1e308', '1e999', '""', 'null'];

const patterns = ['(?:a|a)*b', '(a+)+$', '(?:.*)*x', '([a-z]+)*!', '(?<=(a+)+)b', '\\p{L', '[', '(?i:a|b)', '', '^', '.'];
const stages = (random: Random): object =>
  random.of<() => object>([
    () => ({ type: 'Split', pattern: { Regex: random.of(patterns) }, behavior: 'Isolated', invert: false }),
    () => ({ type: 'Replace', pattern: { Regex: random.of(patterns) }, content: random.of(['', 'aa', 'x'.repeat(1000)]) }),
    () => ({ type: 'Replace', pattern: { String: random.of(['', 'a', '▁']) }, content: 'x'.repeat(random.of([0, 2, 1e5])) }),
    () => ({ type: 'FixedLength', length: random.of([0, -1, 1, 5]) }),
    () => ({ type: 'Strip', content: ' ', start: random.of([0, 1, 1e12]), stop: random.of([0, 1, 1e12]) }),
    () => ({ type: random.of(['ByteLevel', 'ByteFallback', 'Fuse', 'Metaspace', 'WordPiece', 'CTC', 'BPEDecoder', 'NFKC', 'Digits', 'None']) }),
    () => {
      const parts = Array.from({ length: random.of([1, 3, 12]) }, () => stages(random));
      return { type: 'Sequence', decoders: parts, normalizers: parts, pretokenizers: parts };
    },
  ])();

const fragments = [
  '{{ messages[0].content }}',
  '{{ range(1000000000000) }}',
  '{% for i in range(3000000) %}{% for j in range(3000000) %}{% endfor %}{% endfor %}',
  "{{ 'a\nb\n' | indent(500000000) | upper }}",
  "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x | upper }}",
  '{% set ns = namespace(x=[1, 2]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}',
  '{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(0) }}',
  '{{ messages | tojson(indent=100000000) }}',
  "{{ raise_exception('no') }}",
  '{{ nothing.at.all }}',
  `{{ ${'('.repeat(20_000)}1${')'.repeat(20_000)} }}`,
  '{% if %}',
  '{{',
  '{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}',
];

/** The files of a model directory, made wrong in one way that a download, a disk or an enemy may make them. */
export const mutations: readonly Mutation[] = [
  { name: 'truncated', share: 10, mutate: (files, random) => {
    const name = random.of(Object.keys(files));
    const content = files[name] as Uint8Array | string;
    files[name] = content.slice(0, random.below(content.length));
  } },
  { name: 'bytes of a header', share: 20, mutate: (files, random) => {
    const name = random.of(Object.keys(files).filter((each) => each.endsWith('.safetensors')));
    const bytes = files[name] as Uint8Array;
    files[name] = mutateBytes(bytes, random, random.of([8, 8 + splitWeights(bytes).header.length]));
  } },
  { name: 'bytes of the weights', share: 6, mutate: (files, random) => {
    const name = random.of(Object.keys(files).filter((each) => each.endsWith('.safetensors')));
    files[name] = mutateBytes(files[name] as Uint8Array, random);
  } },
  { name: 'dtypes', share: 6, mutate: (files, random) => {
    mutateHeader(files, random, (header) => replaceOne(header, /"F32"/g, random, JSON.stringify(random.of(dtypes))));
  } },
  { name: 'offsets and counts', share: 12, mutate: (files, random) => {
    mutateHeader(files, random, (header) => replaceOne(header, /\b\d+\b/g, random, random.of(counts)));
  } },
  { name: 'JSON of a header', share: 8, mutate: (files, random) => {
    mutateHeader(files, random, (header) => stringify(mutateJson(JSON.parse(header), random)));
  } },
  { name: 'a deep or huge header', share: 2, mutate: (files, random) => {
    mutateHeader(files, random, (header) => random.of([
      '{"a":'.repeat(1e5) + '1' + '}'.repeat(1e5),
      `{"a":[${'[],'.repeat(3e6)}[]]}`,
      header.replace('{', `{"__metadata__":{"a":"${random.of(['\\n', 'x']).repeat(4e6)}"},`),
    ]));
  } },
  { name: 'config.json', share: 12, mutate: (files, random) => {
    files['config.json'] = stringify(mutateJson(JSON.parse(textOf(files, 'config.json')), random));
  } },
  { name: 'the index', share: 6, mutate: (files, random) => {
    const name = 'model.safetensors.index.json';
    files[name] = stringify(mutateJson(JSON.parse(textOf(files, name)), random));
  } },
  { name: 'no regular file', share: 4, mutate: (files, random) => {
    const odd = random.of(['directory', 'fifo', 'loop', 'endless', 'unreadable'] as const);
    files[random.of([...Object.keys(files), 'model.safetensors'])] = { odd };
  } },
  { name: 'generation_config.json', share: 2, mutate: (files, random) => {
    files['generation_config.json'] = stringify({ eos_token_id: junk(random) });
  } },
  { name: 'tokenizer.json', share: 5, mutate: (files, random) => {
    files['tokenizer.json'] = stringify(mutateJson(JSON.parse(textOf(files, 'tokenizer.json')), random));
  } },
  { name: 'merges and ids', share: 2, mutate: (files, random) => {
    const json = JSON.parse(textOf(files, 'tokenizer.json')) as { model: { vocab: Record<string, unknown>; merges: unknown[] } };
    const { vocab, merges } = json.model;
    vocab[random.of(Object.keys(vocab))] = random.of<unknown>([0, -1, 1.5, 2 ** 32, 'a', null, random.below(300)]);
    merges[random.below(merges.length)] = random.of<unknown>([['q', 'q'], ['q'], 'q q', '', [1, 2], null, ['a', '']]);
    files['tokenizer.json'] = JSON.stringify(json);
  } },
  { name: 'regular expressions and stages', share: 2, mutate: (files, random) => {
    const json = JSON.parse(textOf(files, 'tokenizer.json')) as Record<string, unknown>;
    json[random.of(['normalizer', 'pre_tokenizer', 'decoder'])] = stages(random);
    files['tokenizer.json'] = JSON.stringify(json);
  } },
  { name: 'chat templates', share: 3, mutate: (files, random) => {
    const template = Array.from({ length: 1 + random.below(2) }, () => random.of(fragments)).join('');
    if (random.below(2) === 0) files['chat_template.jinja'] = template;
    else files['tokenizer_config.json'] = stringify(mutateJson({ chat_template: template, bos_token: '<|bos|>' }, random));
  } },
];
