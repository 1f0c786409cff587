import { mkdtemp, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { PassThrough } from 'node:stream';
import { text } from 'node:stream/consumers';
import { fileURLToPath } from 'node:url';

import { runCli } from '../run-cli.js';

/** The small model that the repository ships. */
export const needleModel = fileURLToPath(new URL('../../../../models/needle-8m', import.meta.url));

/** A new file of this content, in a folder of its own. */
export async function temporaryFile(name: string, content: string): Promise<string> {
  const file = join(await mkdtemp(join(tmpdir(), 'kv-cli-')), name);
  await writeFile(file, content);
  return file;
}

export interface Ran {
  readonly exitCode: number;
  readonly stdout: string;
  readonly stderr: string;
}

/** Runs the `kv` command in this process, as a shell would. */
export async function runKv(...args: readonly string[]): Promise<Ran> {
  const stdout = new PassThrough();
  const stderr = new PassThrough();
  const written = Promise.all([text(stdout), text(stderr)]);
  const exitCode = await runCli(args, { stdout, stderr });
  stdout.end();
  stderr.end();
  const [out, err] = await written;
  return { exitCode, stdout: out, stderr: err };
}
