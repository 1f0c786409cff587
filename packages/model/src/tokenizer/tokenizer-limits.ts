/**
 * What the process of a tokenizer may take. The times are of computing, so that a busy machine does not shorten them, and
 * a hundred times those of the models that people use: only a regular expression or a template that does not end takes
 * them.
 */
export const tokenizerLimits = {
  /** Milliseconds for any request. */
  milliseconds: 10_000,
  /** More of them for each byte of tokenizer.json, when it is opened. */
  millisecondsPerByte: 0.005,
  /** More of them for each UTF-16 unit of a text that is tokenized. */
  millisecondsPerCharacter: 0.05,
  /** By the clock, how many times as long as it may compute. */
  waitingFactor: 10,
  /** MiB of the process's heap. */
  heapMegabytes: 1024,
  /** Bytes of tokenizer.json. */
  definitionBytes: 256 * 2 ** 20,
};
