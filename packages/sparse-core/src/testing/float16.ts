/** 16-bit floats in plain arithmetic, for oracles. */
const word = new DataView(new ArrayBuffer(8));

function toNumber(bits: number): number {
  const sign = (bits & 0x8000) === 0 ? 1 : -1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction === 0 ? sign * Infinity : NaN;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** Of all 16-bit patterns: the tests widen hundreds of millions. */
const numbers = Float64Array.from({ length: 2 ** 16 }, (_, bits) => toNumber(bits));

/** 2^-14 to 2^15, the exponents of normal numbers. */
const powers = Float64Array.from({ length: 30 }, (_, index) => 2 ** (index - 14));

/** Behind 2^52 there are no fractions, so an addition rounds them. */
function roundHalfEven(x: number): number {
  return x + 2 ** 52 - 2 ** 52;
}

function fromNumber(value: number): number {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const magnitude = Math.abs(value);
  if (Number.isNaN(value)) return 0x7e00;
  if (magnitude >= 65520) return sign | 0x7c00;
  if (magnitude < 2 ** -14) return sign | roundHalfEven(magnitude * 2 ** 24);
  word.setFloat64(0, magnitude);
  const exponent = (word.getUint16(0) >> 4) - 1023;
  // A fraction that rounds up to 1024 carries into the exponent, as it should.
  return sign | (((exponent + 15) << 10) + roundHalfEven((magnitude / (powers[exponent + 14] ?? NaN) - 1) * 1024));
}

function bfloatToNumber(bits: number): number {
  word.setUint32(0, (bits << 16) >>> 0);
  return word.getFloat32(0);
}

function bfloatFromNumber(value: number): number {
  word.setFloat32(0, value);
  const bits = word.getUint32(0);
  if (Number.isNaN(value)) return (bits >>> 16) | 0x40;
  return (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}

export const Float16 = { toNumber: (bits: number): number => numbers[bits] ?? NaN, fromNumber, bfloatToNumber, bfloatFromNumber };
