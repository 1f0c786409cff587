import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

/** A tensor to write: `bytes` where the content matters, zeros otherwise. */
export interface TensorToWrite {
  readonly dtype: 'F32' | 'F16' | 'BF16' | 'I64';
  readonly shape: readonly number[];
  readonly bytes?: Uint8Array | undefined;
}

const elementBytes = { F32: 4, F16: 2, BF16: 2, I64: 8 } as const;

/** A file of any header and any data, right or wrong. */
export function rawFile(header: string, data: Uint8Array = new Uint8Array()): Uint8Array {
  const text = new TextEncoder().encode(header);
  const file = new Uint8Array(8 + text.byteLength + data.byteLength);
  new DataView(file.buffer).setBigUint64(0, BigInt(text.byteLength), true);
  file.set(text, 8);
  file.set(data, 8 + text.byteLength);
  return file;
}

/** A well-formed safetensors file, its header padded with spaces to a multiple of eight bytes. */
export function safetensorsFile(tensors: Readonly<Record<string, TensorToWrite>>): Uint8Array {
  const header: Record<string, unknown> = { __metadata__: { format: 'pt' } };
  const parts: Uint8Array[] = [];
  let offset = 0;
  for (const [name, { dtype, shape, bytes }] of Object.entries(tensors)) {
    const length = shape.reduce((product, extent) => product * extent, elementBytes[dtype]);
    header[name] = { dtype, shape, data_offsets: [offset, offset + length] };
    parts.push(bytes ?? new Uint8Array(length));
    offset += length;
  }
  const text = JSON.stringify(header);
  return rawFile(text.padEnd(Math.ceil(text.length / 8) * 8), Buffer.concat(parts));
}

/** Writes files into a new directory, gives its path to `use`, and removes it. */
export async function withDirectory<Result>(
  files: Readonly<Record<string, Uint8Array | string>>,
  use: (directory: string) => Promise<Result>,
): Promise<Result> {
  const directory = await mkdtemp(join(tmpdir(), 'kv-model-'));
  try {
    for (const [name, content] of Object.entries(files)) await writeFile(join(directory, name), content);
    return await use(directory);
  } finally {
    await rm(directory, { recursive: true });
  }
}
