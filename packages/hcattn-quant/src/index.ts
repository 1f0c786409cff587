export { type CodeBits, quantizedBlockBytes, type QuantizedBlocks } from './quantized-blocks.js';
