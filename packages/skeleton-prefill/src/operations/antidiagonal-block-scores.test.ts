import { InvalidValueError } from '@kv/sparse-core';
import { describeOnDevices } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import { antidiagonalByDefinition } from '../testing/block-scores-by-definition.js';
import { randomHeads, scoreOnDevice } from '../testing/block-scores-on-device.js';
import { describeBlockScores } from '../testing/describe-block-scores.js';
import { antidiagonalBlockScores, antidiagonalStrides } from './antidiagonal-block-scores.js';

for (const stride of antidiagonalStrides) {
  describeBlockScores(
    `antidiagonalBlockScores with stride ${stride}`,
    (stream, args) => { antidiagonalBlockScores(stream, { ...args, stride }); },
    (head) => antidiagonalByDefinition(head, stride),
    { termsOf: (dim) => stride * dim },
  );
}

describeOnDevices('antidiagonalBlockScores', ({ open }) => {
  it('refuses other strides', async () => {
    const sizes = { rows: 8, tokens: 64, kvHeads: 1, group: 1, dim: 8, blockTokens: 64, dtype: 'f32' } as const;
    for (const stride of [0, 4, 12, NaN]) {
      const call = scoreOnDevice(
        (stream, args) => { antidiagonalBlockScores(stream, { ...args, stride: stride as 8 }); },
        open(), randomHeads(sizes), sizes,
      );
      await expect(call).rejects.toThrow(InvalidValueError);
    }
  });
});
