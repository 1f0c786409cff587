import { embedding } from '../operations/embedding.js';
import type { Stream } from '../handles.js';

/** What `enqueueFailure` fails with. */
export const enqueuedFailure = /embedding: ids\[0\] is 7/;

/** Enqueues an operation that fails when the device comes to it. */
export function enqueueFailure(stream: Stream): void {
  using table = stream.device.tensor('f32', ['row', 'feature'], [1, 1], new Float32Array(1));
  using ids = stream.device.tensor('i32', ['token'], [1], Int32Array.of(7));
  using output = stream.device.tensor('f32', ['token', 'feature'], [1, 1]);
  embedding(stream, { table, ids, output });
}
