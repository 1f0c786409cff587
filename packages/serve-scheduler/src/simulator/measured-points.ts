// What figures show beside what is simulated: medians of measured rows of docs/benchmarks, with which costs.test.ts compares them.

/** Fig. 8, %: which blocks of a step one of the 1, 2, 4, 8, 12 and 16 steps before chose too (serving-quality.json). */
export const overlapOfSmallModel = [64.2, 79.2, 88.1, 94.2, 95.7, 96.5];

/** Fig. 16b: attention of a prompt of 32K in chunks of 512 to 4,096 tokens, in that of one piece, of as many heads (prompt-chunks-h200.json). */
export const chunksMeasured = { gpu: 'NVIDIA H200', shares: { 'lwm-7b': [1.072, 1.087, 1.078, 1.053], 'llama3-8b': [1.113, 1.087, 1.07, 1.04] } };

/**
 * Fig. 14b, of serving-h200.json: a kernel of four thread blocks that stores blocks of 16 KiB in host memory, and by which share a
 * product of matrices beside it takes longer.
 */
export const storeKernel = { gpu: 'NVIDIA H200', gigabytesPerSecond: 51.3, slowed: 0.123 };
