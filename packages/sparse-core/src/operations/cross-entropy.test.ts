import { expect, it } from 'vitest';
import { InvalidValueError, ShapeError } from '../errors.js';
import { Random } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { crossEntropy } from './cross-entropy.js';

/** In f64. */
function oracle(logits: readonly number[], target: number): number {
  const greatest = Math.max(...logits);
  const sum = logits.reduce((total, logit) => total + Math.exp(logit - greatest), 0);
  return greatest + Math.log(sum) - (logits[target] ?? NaN);
}

describeOnDevices('crossEntropy', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it('is the negative logarithm of the probability of each target', async () => {
    const random = new Random(41);
    for (let round = 0; round < 40; round++) {
      const [rows, vocabulary] = [random.integer(1, 6), random.integer(1, 700)];
      const [spread, shift] = [random.integer(1, 30), random.integer(-50, 50)];
      const values = Float32Array.from({ length: rows * vocabulary }, () => shift + spread * (random.next() - 0.5));
      const targets = Array.from({ length: rows }, () => random.integer(0, vocabulary - 1));
      using logits = device.tensor('f32', ['row', 'vocabulary'], [rows, vocabulary], values);
      using output = device.tensor('f32', ['row'], [rows], new Float32Array(rows).fill(NaN));
      crossEntropy(stream, { logits, targets, output });
      const measured = await output.read();
      targets.forEach((target, row) => {
        const own = Array.from(values.subarray(row * vocabulary, (row + 1) * vocabulary));
        // Greatest logit and sum are rounded to f32 (logits reach 65, and 2^-24 of that is 4e-6); the sum of up to
        // 700 terms of one sign and the exponentials add a few 1e-6, relative to 1 within the logarithm.
        expect(Math.abs((measured[row] ?? NaN) - oracle(own, target))).toBeLessThan(2e-5);
      });
    }
  });

  it('is infinite for a target that cannot come, and the rows do not mix', async () => {
    const values = new Float32Array([0, -Infinity, 0, 1, 2, 3]);
    using logits = device.tensor('f32', ['row', 'vocabulary'], [2, 3], values);
    using output = device.tensor('f32', ['row'], [2]);
    crossEntropy(stream, { logits, targets: [1, 2], output });
    const [first, second = NaN] = await output.read();
    expect(first).toBe(Infinity);
    expect(second).toBeCloseTo(Math.log(1 + Math.exp(-1) + Math.exp(-2)), 6);
  });

  it('refuses targets that do not fit', () => {
    using logits = device.tensor('f32', ['row', 'vocabulary'], [2, 3]);
    using output = device.tensor('f32', ['row'], [2]);
    expect(() => crossEntropy(stream, { logits, targets: [1], output })).toThrow(ShapeError);
    expect(() => crossEntropy(stream, { logits, targets: [0, 3], output })).toThrow(InvalidValueError);
    expect(() => crossEntropy(stream, { logits, targets: [0, -1], output })).toThrow(InvalidValueError);
  });
});
