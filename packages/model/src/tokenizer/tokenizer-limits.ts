/**
 * What the process of a tokenizer may take. The times are a hundred times those of the models that people use, so that
 * only a regular expression or a template that does not end meets them, also on a busy machine.
 */
export const tokenizerLimits = {
  /** Milliseconds for any request. */
  milliseconds: 10_000,
  /** More of them for each byte of tokenizer.json, when it is opened. */
  millisecondsPerByte: 0.005,
  /** More of them for each UTF-16 unit of a text that is tokenised. */
  millisecondsPerCharacter: 0.05,
  /** MiB of the process's heap. */
  heapMegabytes: 1024,
  /** Bytes of tokenizer.json. */
  definitionBytes: 256 * 2 ** 20,
};
