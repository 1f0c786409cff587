import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { bytesPerElement, formatHeader } from '../files/safetensors-header.js';

/** A tensor to write: `bytes` where the content matters, zeros otherwise. */
export interface TensorToWrite {
  readonly dtype: 'F32' | 'F16' | 'BF16' | 'I64';
  readonly shape: readonly number[];
  readonly bytes?: Uint8Array | undefined;
}

/** A file of any header and any data, right or wrong. */
export function rawFile(header: string, data: Uint8Array = new Uint8Array()): Uint8Array {
  const text = new TextEncoder().encode(header);
  const file = new Uint8Array(8 + text.byteLength + data.byteLength);
  new DataView(file.buffer).setBigUint64(0, BigInt(text.byteLength), true);
  file.set(text, 8);
  file.set(data, 8 + text.byteLength);
  return file;
}

/** A well-formed safetensors file. */
export function safetensorsFile(tensors: Readonly<Record<string, TensorToWrite>>): Uint8Array {
  const parts = Object.values(tensors).map(({ dtype, shape, bytes }) => {
    return bytes ?? new Uint8Array(shape.reduce((product, extent) => product * extent, bytesPerElement[dtype]));
  });
  return Uint8Array.from(Buffer.concat([formatHeader(tensors, { format: 'pt' }), ...parts]));
}

/** Writes files into a new directory, gives its path to `use`, and removes it. */
export async function withDirectory<Result>(
  files: Readonly<Record<string, Uint8Array | string>>,
  use: (directory: string) => Promise<Result>,
): Promise<Result> {
  const directory = await mkdtemp(join(tmpdir(), 'kv-files-'));
  try {
    for (const [name, content] of Object.entries(files)) await writeFile(join(directory, name), content);
    return await use(directory);
  } finally {
    await rm(directory, { recursive: true });
  }
}
