import { execFile } from 'node:child_process';
import { promisify } from 'node:util';
import { describe, expect, it } from 'vitest';
import { nativeBinary } from './load-addon.js';

/** Threads until there are no more, in plain JavaScript: a limit of the process would be the test runner's too. */
const program = `
  const addon = require(process.argv[1]);
  const open = (threads) => new addon.NativeDevice('cpu', 0, threads, undefined, 0);
  const codeOf = (call) => {
    try {
      call();
    } catch (error) {
      return error.code;
    }
  };
  const refusedDevice = codeOf(() => open(1024));
  const device = open(2);
  const streams = [];
  const refusedStream = codeOf(() => {
    while (streams.length < 1024) streams.push(device.createStream());
  });
  const recording = (streams[0].beginRecording(), streams[0].endRecording());
  for (const stream of streams) stream.close();
  recording.release();
  device.createStream().synchronize().then(() => console.log(refusedDevice, refusedStream));
`;

describe('a process that can have no more threads', () => {
  it.skipIf(process.platform !== 'linux')('is told so, and closes what it has', async () => {
    // Room in the address space for some of 1,024 stacks.
    const limited = 'ulimit -s 8192 && ulimit -v 6000000 && exec "$0" "$@"';
    const { stdout } = await promisify(execFile)('sh', ['-c', limited, process.execPath, '-e', program, nativeBinary().path]);
    expect(stdout.trim()).toBe('KV_OUT_OF_MEMORY KV_OUT_OF_MEMORY');
  });
});
