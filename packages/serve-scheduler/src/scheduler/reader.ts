/** What a request is known to have read. */
export interface Reader {
  /** Tokens in its cache. */
  readonly length: number;
  /** Tokens that a kv head reads. */
  readonly budgetTokens: number;
  /** Blocks of one layer that its last steps read beside pinned ones, each counted once. Undefined before its first. */
  workingSet: number | undefined;
}
