import { execFile } from 'node:child_process';
import { mkdtemp, rm, truncate, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { describe, expect, it } from 'vitest';
import { nativeBinary } from './load-addon.js';

/** In plain JavaScript: a limit of the process would be the test runner's too. */
const program = `
  const addon = require(process.argv[1]);
  const device = new addon.NativeDevice('cpu', 0, 1, undefined, 0);
  addon.mapFile(device, process.argv[2]).catch(({ code, message }) => console.log(code, message));
`;

describe('a file that is larger than the addresses of the process', () => {
  it.skipIf(process.platform !== 'linux')('is no malformed file: it is told what to raise', async () => {
    const folder = await mkdtemp(join(tmpdir(), 'kv-addresses-'));
    try {
      const file = join(folder, 'weights');
      await writeFile(file, '');
      await truncate(file, 16 * 2 ** 30); // without contents: it takes no room
      const limited = 'ulimit -v 6000000 && exec "$0" "$@"';
      const { stdout } = await promisify(execFile)('sh', ['-c', limited, process.execPath, '-e', program, nativeBinary().path, file]);
      expect(stdout.trim()).toBe(
        `KV_OUT_OF_MEMORY ${file} could not be mapped: its 17179869184 bytes are more than the process has addresses for. Raise its limit (ulimit -v).`,
      );
    } finally {
      await rm(folder, { recursive: true });
    }
  });
});
