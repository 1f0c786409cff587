/** How many rows of memory a thread may read at once. */
export const memoryStreams = [1, 2, 4] as const;
export type MemoryStreams = (typeof memoryStreams)[number];
