import { ModelFormatError } from '../errors.js';
import { describeValue, excerpt, isRecord, parseJson } from './read-json.js';

/** Bytes of one element of each dtype that a safetensors file may hold. */
export const bytesPerElement = {
  BOOL: 1,
  U8: 1,
  I8: 1,
  F8_E5M2: 1,
  F8_E4M3: 1,
  I16: 2,
  U16: 2,
  F16: 2,
  BF16: 2,
  I32: 4,
  U32: 4,
  F32: 4,
  I64: 8,
  U64: 8,
  F64: 8,
} as const;

/** A dtype as the format spells it. */
export type StoredDType = keyof typeof bytesPerElement;

/** One tensor of a safetensors file. */
export interface StoredTensor {
  readonly name: string;
  /** The file that holds it. */
  readonly file: string;
  readonly dtype: StoredDType;
  readonly shape: readonly number[];
  /** Offset of the first byte from the start of the file. */
  readonly byteOffset: number;
  readonly byteLength: number;
}

export interface SafetensorsHeader {
  readonly tensors: ReadonlyMap<string, StoredTensor>;
  readonly metadata: Readonly<Record<string, string>>;
}

/** The length of the length field: a little-endian u64 before the header. */
export const lengthFieldBytes = 8;
/** A third of the format's own limit: it is parsed on the JavaScript thread. Headers of large models have 200 kB. */
export const maxHeaderBytes = 32 * 2 ** 20;
/** Ten times those of the largest model in one file: so many take a tenth of a second. */
export const maxTensors = 16_384;

/** A tensor as the header describes it. */
interface TensorEntry {
  readonly dtype: string;
  readonly shape: readonly number[];
  readonly data_offsets: readonly [number, number];
}

const areCounts = (value: unknown): value is number[] =>
  Array.isArray(value) && value.every((count) => Number.isSafeInteger(count) && count >= 0);

const isTensorEntry = (value: unknown): value is TensorEntry =>
  isRecord(value) &&
  typeof value.dtype === 'string' &&
  areCounts(value.shape) &&
  areCounts(value.data_offsets) &&
  value.data_offsets.length === 2;

const isRecordOfTexts = (value: unknown): value is Record<string, string> =>
  isRecord(value) && Object.values(value).every((text) => typeof text === 'string');

/**
 * Reads the header's byte length from the first bytes of a file.
 * @param start the first `lengthFieldBytes` bytes, or fewer when the file is shorter
 * @param fileBytes byte length of the whole file
 * @throws ModelFormatError when the file is too short for the header that it promises, or the header is too
 *   long
 */
export function readHeaderLength(file: string, start: Uint8Array, fileBytes: number): number {
  if (start.byteLength < lengthFieldBytes) {
    fail(file, `${fileBytes} bytes`, `at least ${lengthFieldBytes} bytes`, 'The file is truncated');
  }
  const length = new DataView(start.buffer, start.byteOffset).getBigUint64(0, true);
  if (length > BigInt(maxHeaderBytes)) {
    fail(file, `a header of ${length} bytes`, `at most ${maxHeaderBytes}`, 'No model needs this');
  }
  const available = fileBytes - lengthFieldBytes;
  if (Number(length) > available) {
    fail(
      file,
      `a header of ${length} bytes, of which ${available} are there`,
      'all of it',
      'The file is truncated',
    );
  }
  return Number(length);
}

/**
 * Parses and checks a header: every tensor's dtype, shape and byte range agree, and the ranges cover the data
 * once, without holes or overlaps, as the format demands.
 * @param header the header's bytes, without the length field
 * @param fileBytes byte length of the whole file
 * @throws ModelFormatError naming the file and the tensor
 */
export function parseHeader(file: string, header: Uint8Array, fileBytes: number): SafetensorsHeader {
  const text = decodeUtf8(file, header);
  const { value: json, outerKeys } = parseJson(`the header of ${file}`, text);
  if (!isRecord(json))
    fail(file, 'a header that is not an object', 'a JSON object', 'This is no safetensors file');
  if (outerKeys.length > maxTensors + 1)
    fail(file, `${outerKeys.length} tensors`, `at most ${maxTensors}`, 'No model needs this');
  const repeated = findRepeated(outerKeys);
  if (repeated !== undefined)
    fail(file, `tensor '${excerpt(repeated)}' twice`, 'unique names', 'Write the file again');

  const dataStart = lengthFieldBytes + header.byteLength;
  const tensors = new Map<string, StoredTensor>();
  let metadata: Record<string, string> = {};
  for (const [name, value] of Object.entries(json)) {
    if (name === '__metadata__') metadata = parseMetadata(file, value);
    else tensors.set(name, parseTensor(file, name, value, dataStart));
  }
  checkCoverage(file, [...tensors.values()], dataStart, fileBytes);
  return { tensors, metadata };
}

/**
 * The header of a file that holds these tensors one after the other, with the length field before it, padded so that
 * elements begin at a multiple of eight bytes.
 */
export function formatHeader(
  tensors: Readonly<Record<string, Pick<StoredTensor, 'dtype' | 'shape'>>>,
  metadata: Readonly<Record<string, string>>,
): Uint8Array {
  const header: Record<string, unknown> = { __metadata__: metadata };
  let begin = 0;
  for (const [name, { dtype, shape }] of Object.entries(tensors)) {
    const end = shape.reduce((product, extent) => product * extent, bytesPerElement[dtype]) + begin;
    header[name] = { dtype, shape, data_offsets: [begin, end] };
    begin = end;
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const bytes = new Uint8Array(lengthFieldBytes + Math.ceil(text.byteLength / 8) * 8).fill(0x20);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(bytes.byteLength - lengthFieldBytes), true);
  bytes.set(text, lengthFieldBytes);
  return bytes;
}

function decodeUtf8(file: string, bytes: Uint8Array): string {
  try {
    return new TextDecoder('utf-8', { fatal: true }).decode(bytes);
  } catch (cause) {
    throw new ModelFormatError(`${file}: the header is not UTF-8. This is no safetensors file.`, {
      subject: file,
      wanted: 'UTF-8 JSON',
      cause,
    });
  }
}

/** The first of some JSON strings that stands for the same text as one before it, whatever its spelling. */
function findRepeated(spellings: readonly string[]): string | undefined {
  const seen = new Set<string>();
  for (const spelling of spellings) {
    const key = JSON.parse(spelling) as string;
    if (seen.has(key)) return key;
    seen.add(key);
  }
  return undefined;
}

function parseMetadata(file: string, value: unknown): Record<string, string> {
  if (isRecordOfTexts(value)) return value;
  return fail(file, `__metadata__ ${describeValue(value)}`, 'an object of strings', 'Write the file again');
}

function parseTensor(file: string, name: string, value: unknown, dataStart: number): StoredTensor {
  const subject = `${file}: tensor '${excerpt(name)}'`;
  if (!isTensorEntry(value)) {
    fail(
      subject,
      describeValue(value),
      'dtype, shape and data_offsets of whole numbers',
      'Write the file again',
    );
  }
  const {
    dtype,
    shape,
    data_offsets: [begin, end],
  } = value;
  if (!isStoredDType(dtype)) {
    fail(subject, `dtype ${excerpt(dtype)}`, Object.keys(bytesPerElement).join(', '), 'Convert the weights');
  }
  const byteLength = shape.reduce((product, extent) => product * extent, bytesPerElement[dtype]);
  if (byteLength !== end - begin) {
    fail(
      subject,
      `bytes ${begin}..${end} (${end - begin})`,
      `${byteLength} for ${dtype} [${excerpt(shape.join(', '))}]`,
      'Write the file again',
    );
  }
  return { name, file, dtype, shape, byteOffset: dataStart + begin, byteLength };
}

function isStoredDType(dtype: string): dtype is StoredDType {
  return Object.hasOwn(bytesPerElement, dtype);
}

function checkCoverage(file: string, tensors: StoredTensor[], dataStart: number, fileBytes: number): void {
  tensors.sort((a, b) => a.byteOffset - b.byteOffset || a.byteLength - b.byteLength);
  let cursor = dataStart;
  for (const { name, byteOffset, byteLength } of tensors) {
    if (byteOffset !== cursor) {
      const what = byteOffset < cursor ? 'overlaps the tensor before it' : 'leaves a hole before it';
      fail(
        `${file}: tensor '${excerpt(name)}' ${what}`,
        `offset ${byteOffset - dataStart}`,
        `offset ${cursor - dataStart}`,
        'Write the file again',
      );
    }
    cursor += byteLength;
  }
  if (cursor !== fileBytes) {
    const remedy = cursor > fileBytes ? 'The file is truncated' : 'The file has bytes that no tensor owns';
    fail(file, `${fileBytes - dataStart} bytes of data`, `${cursor - dataStart} bytes`, remedy);
  }
}

function fail(subject: string, given: string, wanted: string, remedy: string): never {
  throw new ModelFormatError(
    `${subject}: given ${given}, wanted ${wanted}. ${remedy}; fetch or make it anew.`,
    {
      subject,
      given,
      wanted,
    },
  );
}
