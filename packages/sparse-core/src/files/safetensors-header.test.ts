import fc from 'fast-check';
import { describe, expect, it } from 'vitest';

import { ModelFormatError } from '../errors.js';
import { rawFile, safetensorsFile } from '../testing/safetensors-file.js';
import { lengthFieldBytes, maxHeaderBytes, maxTensors, parseHeader, readHeaderLength } from './safetensors-header.js';
import type { SafetensorsHeader } from './safetensors-header.js';

function parse(file: Uint8Array): SafetensorsHeader {
  const length = readHeaderLength('x.safetensors', file.subarray(0, lengthFieldBytes), file.byteLength);
  return parseHeader(
    'x.safetensors',
    file.subarray(lengthFieldBytes, lengthFieldBytes + length),
    file.byteLength,
  );
}

function withLength(length: bigint, file = safetensorsFile({ a: { dtype: 'F32', shape: [2] } })): Uint8Array {
  const copy = file.slice();
  new DataView(copy.buffer).setBigUint64(0, length, true);
  return copy;
}

const a = (dtype: string, shape: unknown, offsets: unknown): string =>
  `"a": ${JSON.stringify({ dtype, shape, data_offsets: offsets })}`;
const eight = new Uint8Array(8);

describe('a well-formed header', () => {
  it('gives every tensor its dtype, shape and place', () => {
    const file = safetensorsFile({
      weight: { dtype: 'BF16', shape: [3, 5] },
      empty: { dtype: 'F16', shape: [0, 7] },
      scalar: { dtype: 'F32', shape: [] },
    });
    const { tensors, metadata } = parse(file);
    expect([...tensors.keys()]).toEqual(['weight', 'empty', 'scalar']);
    expect(tensors.get('weight')).toMatchObject({ dtype: 'BF16', shape: [3, 5], byteLength: 30 });
    expect(tensors.get('scalar')).toMatchObject({ byteOffset: file.byteLength - 4, byteLength: 4 });
    expect(metadata).toEqual({ format: 'pt' });
  });

  it('takes tensors in any order of their offsets', () => {
    const b = '"b": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}';
    expect(parse(rawFile(`{${a('F32', [1], [4, 8])},${b}}`, eight)).tensors.size).toBe(2);
  });
});

describe('a malformed header is refused', () => {
  const cases: [string, Uint8Array, RegExp][] = [
    ['an empty file', new Uint8Array(), /truncated/],
    ['a file shorter than the length field', new Uint8Array(5), /truncated/],
    ['a header longer than is read', withLength(BigInt(maxHeaderBytes) + 1n), /at most 33554432/],
    ['a header length of 2^64 - 1', withLength(2n ** 64n - 1n), /at most 33554432/],
    ['a header longer than the file', withLength(90_000n), /truncated/],
    ['a header length of zero', withLength(0n), /not valid JSON/],
    ['more tensors than are read', rawFile(`{${'"a":0,'.repeat(maxTensors + 1)}"a":0}`), /at most 16384/],
    ['no JSON', rawFile('weights!'), /not valid JSON/],
    ['JSON that is no object', rawFile('[1, 2]'), /JSON object/],
    [
      'bytes that are no UTF-8',
      withLength(3n, new Uint8Array([0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xfe, 0x7b])),
      /UTF-8/,
    ],
    ['an unknown dtype', rawFile(`{${a('F7', [2], [0, 8])}}`, eight), /'a'.*dtype F7/],
    ['a dtype from the prototype', rawFile(`{${a('toString', [2], [0, 8])}}`, eight), /dtype toString/],
    ['a negative offset', rawFile(`{${a('F32', [2], [-8, 0])}}`, eight), /whole numbers/],
    ['a fractional offset', rawFile(`{${a('F32', [2], [0.5, 8.5])}}`, eight), /whole numbers/],
    ['offsets that are no pair', rawFile(`{${a('F32', [2], [0])}}`, eight), /whole numbers/],
    ['a negative extent', rawFile(`{${a('F32', [-2, -1], [0, 8])}}`, eight), /whole numbers/],
    ['a shape that is no list', rawFile(`{${a('F32', '2', [0, 8])}}`, eight), /whole numbers/],
    ['a tensor that is no object', rawFile('{"a": null}'), /whole numbers/],
    ['offsets in descending order', rawFile(`{${a('F32', [2], [8, 0])}}`, eight), /bytes 8\.\.0/],
    ['a shape that needs other bytes', rawFile(`{${a('F32', [3], [0, 8])}}`, eight), /12 for F32 \[3\]/],
    ['a dtype that needs other bytes', rawFile(`{${a('F16', [2], [0, 8])}}`, eight), /4 for F16/],
    ['a shape beyond 2^53 elements', rawFile(`{${a('F32', [2 ** 40, 2 ** 40], [0, 8])}}`, eight), /for F32/],
    [
      'an offset beyond 2^53',
      rawFile('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,1e300]}}', eight),
      /whole/,
    ],
    [
      'overlapping tensors',
      rawFile(`{${a('F32', [2], [0, 8])},"b":${a('F32', [1], [4, 8]).slice(4)}}`, eight),
      /overlaps/,
    ],
    ['a hole', rawFile(`{${a('F32', [1], [4, 8])}}`, eight), /hole/],
    ['data that end early', rawFile(`{${a('F32', [2], [0, 8])}}`, eight.subarray(1)), /truncated/],
    ['data that no tensor owns', rawFile(`{${a('F32', [1], [0, 4])}}`, eight), /no tensor owns/],
    [
      'a name given twice',
      rawFile(`{${a('F32', [2], [0, 8])},${a('F32', [2], [0, 8])}}`, eight),
      /'a' twice/,
    ],
    [
      'a name given twice in two spellings',
      rawFile(`{${a('F32', [2], [0, 8])},"\\u0061": 1}`, eight),
      /'a' twice/,
    ],
    ['metadata that are no texts', rawFile('{"__metadata__": {"format": 1}}'), /object of strings/],
  ];
  it.each(cases)('%s', (_name, file, message) => {
    expect(() => parse(file)).toThrow(ModelFormatError);
    expect(() => parse(file)).toThrow(message);
  });

  it('is named with its file, and carries given and wanted', () => {
    try {
      parse(rawFile(`{${a('F7', [2], [0, 8])}}`, eight));
      expect.unreachable();
    } catch (error) {
      expect(error).toMatchObject({
        code: 'KV_MODEL_FORMAT',
        subject: "x.safetensors: tensor 'a'",
        given: 'dtype F7',
      });
    }
  });
});

describe('any bytes', () => {
  const seed = 20_260_101;
  const valid = safetensorsFile({
    'model.norm.weight': { dtype: 'F32', shape: [4] },
    'model.embed_tokens.weight': { dtype: 'BF16', shape: [6, 4] },
  });
  const mutated = fc
    .array(fc.tuple(fc.nat(valid.byteLength - 1), fc.nat(255)), { minLength: 1, maxLength: 3 })
    .map((edits) => {
      const copy = valid.slice();
      for (const [at, byte] of edits) copy[at] = byte;
      return copy;
    });
  const truncated = fc.nat(valid.byteLength - 1).map((length) => valid.slice(0, length));
  const entry = fc.record({
    dtype: fc.oneof(fc.constantFrom('F32', 'F16', 'I64'), fc.jsonValue()),
    shape: fc.oneof(fc.array(fc.nat(3), { maxLength: 3 }), fc.jsonValue()),
    data_offsets: fc.oneof(fc.tuple(fc.nat(16), fc.nat(16)), fc.jsonValue()),
  });
  const structured = fc
    .tuple(
      fc.dictionary(
        fc.string({ maxLength: 12 }),
        fc.oneof({ weight: 4, arbitrary: entry }, { weight: 1, arbitrary: fc.jsonValue() }),
        { maxKeys: 3 },
      ),
      fc.nat(16),
    )
    .map(([header, bytes]) => rawFile(JSON.stringify(header), new Uint8Array(bytes)));

  it('are read, or refused with a ModelFormatError (10,000 cases)', () => {
    const outcomes = { read: 0, refused: 0 };
    fc.assert(
      fc.property(fc.oneof(mutated, truncated, structured, fc.uint8Array({ maxLength: 200 })), (file) => {
        try {
          const { tensors } = parse(file);
          for (const { byteOffset, byteLength } of tensors.values()) {
            expect(byteOffset + byteLength).toBeLessThanOrEqual(file.byteLength);
          }
          outcomes.read += 1;
        } catch (error) {
          if (!(error instanceof ModelFormatError)) throw error;
          outcomes.refused += 1;
        }
      }),
      { numRuns: 10_000, seed },
    );
    expect(outcomes.read).toBeGreaterThan(100);
    expect(outcomes.refused).toBeGreaterThan(1000);
  });
});
