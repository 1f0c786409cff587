const words = new DataView(new ArrayBuffer(4));

/**
 * The bf16 nearest to an f32, of two equally near ones the even, as a number: `Float32Array.map(roundToBf16)` rounds an
 * array. NaN stays NaN, and what is above the greatest bf16 by half a step or more becomes infinite.
 */
export function roundToBf16(value: number): number {
  if (Number.isNaN(value)) return value;
  words.setFloat32(0, value);
  const bits = words.getUint32(0);
  const odd = (bits >>> 16) & 1;
  // Adds half a step, less one where the lower neighbour is even, and cuts off; a carry moves into the exponent.
  words.setUint32(0, ((bits + 0x7fff + odd) & 0xffff0000) >>> 0);
  return words.getFloat32(0);
}
