import { once } from 'node:events';
import { setTimeout } from 'node:timers/promises';
import { Worker } from 'node:worker_threads';
import { describe, expect, it } from 'vitest';
import { nativeBinary } from './load-addon.js';

/** Uses the addon as the package does, without TypeScript: a worker starts from plain JavaScript. */
const program = `
  const { parentPort, workerData } = require('node:worker_threads');
  const addon = require(workerData);
  const device = new addon.NativeDevice('cpu', 0, 2, undefined, 0);
  const stream = device.createStream();
  const bytes = 1 << 24;
  const [from, to] = [0, 1].map(() => device.allocate(8, [bytes], [1], 0, bytes));
  for (let i = 0; i < 200; i++) addon.copy(stream, to, from);
  parentPort.postMessage('enqueued');
  stream.synchronize().then(() => parentPort.postMessage('done'));
`;
const addonPath = nativeBinary().path;

/** Reads into its own arrays, for longer than it will live; half of the streams are being closed then. */
const reader = `
  const { parentPort, workerData } = require('node:worker_threads');
  const addon = require(workerData);
  const device = new addon.NativeDevice('cpu', 0, 1, undefined, 0);
  const bytes = 1 << 27;
  const tensor = device.allocate(8, [bytes], [1], 0, bytes);
  for (const closed of [false, true]) {
    const stream = device.createStream();
    for (let i = 0; i < 5; i++) addon.read(stream, tensor, new Uint8Array(bytes)).catch(() => undefined);
    if (closed) setTimeout(() => stream.close(), 5);
  }
  parentPort.postMessage('reading');
  setInterval(() => undefined, 1000);
`;

describe('worker threads', () => {
  it('each have their own environment of the addon', async () => {
    const runs = [0, 1, 2].map(async () => {
      const worker = new Worker(program, { eval: true, workerData: addonPath });
      const messages: unknown[] = [];
      worker.on('message', (message) => messages.push(message));
      await once(worker, 'exit');
      return messages;
    });
    for (const messages of await Promise.all(runs)) expect(messages).toEqual(['enqueued', 'done']);
  });

  it('may be terminated while their work runs', async () => {
    for (let round = 0; round < 5; round++) {
      const worker = new Worker(program, { eval: true, workerData: addonPath });
      await once(worker, 'message');
      expect(await worker.terminate()).toBe(1);
    }
  });

  it('may be terminated while memory of theirs is written', async () => {
    for (let round = 0; round < 8; round++) {
      const worker = new Worker(reader, { eval: true, workerData: addonPath });
      await once(worker, 'message');
      await setTimeout(7 * round);
      expect(await worker.terminate()).toBe(1);
    }
  });
});
