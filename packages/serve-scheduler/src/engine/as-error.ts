import { DisposedError } from '@kv/sparse-core';

/** What was thrown, as an error. */
function asError(error: unknown): Error {
  return error instanceof Error ? error : new Error(String(error));
}

/** What a thing was ended by, such as the sequences of a stream that failed: whoever asked for tokens never saw that thing. */
export function originOf(thrown: unknown): Error {
  const error = asError(thrown);
  return error instanceof DisposedError && error.cause !== undefined ? originOf(error.cause) : error;
}

/** What an engine says that cannot go on. */
export function endedBy(thrown: unknown): DisposedError {
  const cause = asError(thrown);
  return new DisposedError(`The engine was ended by an error (${cause.message}); create another.`, { subject: 'engine', cause });
}
