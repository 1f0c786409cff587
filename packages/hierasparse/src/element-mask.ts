import { types } from 'node:util';
import { CapabilityError, type Device, DTypeError, ShapeError, type TensorHandle } from '@kv/sparse-core';
import { expectThat, isDevice } from '@kv/sparse-core/native';
import { blockTokens, type KvOperand } from './blocks-24.js';
import { expectHeadDim, expectOperand } from './operations/block-arguments.js';

/** Which elements of a sparse block are kept, the same in all blocks of a kv head; of four neighbours at most two. */
export class ElementMask implements Disposable {
  readonly operand: KvOperand;
  /** u8 `[kvHead, blockToken, dim]`: not zero where an element is kept. */
  readonly kept: TensorHandle<'u8', readonly ['kvHead', 'blockToken', 'dim']>;
  /** Whether the constructor has checked it: neither a look-alike nor a proxy has this. */
  readonly #checked = true;

  static is(value: unknown): value is ElementMask {
    return typeof value === 'object' && value !== null && #checked in value;
  }

  /**
   * @param kept `[kvHead, blockToken, dim]`, not zero where an element is kept
   * @throws CapabilityError when more than two of four neighbours are kept: neighbours of a key are the dims
   *   `4 n .. 4 n + 3` of a token, neighbours of a value the tokens `4 n .. 4 n + 3` of a dim; or when such heads have
   *   no sparse blocks
   * @throws ShapeError when `kept` is not of whole blocks, DTypeError when it is no `Uint8Array`
   */
  constructor(device: Device, operand: KvOperand, headDim: number, kept: Uint8Array) {
    expectThat('ElementMask', 'device', device, isDevice(device), 'a device');
    expectOperand('ElementMask', operand);
    expectHeadDim('ElementMask', headDim);
    if (!types.isUint8Array(kept)) {
      throw new DTypeError('The element mask must be a Uint8Array, not zero where an element is kept.', {
        subject: 'kept',
        given: kept,
        wanted: 'Uint8Array',
      });
    }
    const blockElements = blockTokens * headDim;
    if (kept.length === 0 || kept.length % blockElements !== 0) {
      throw new ShapeError(
        `The mask has ${kept.length} elements; it must have ${blockTokens} x ${headDim} for each kv head.`,
        { subject: 'kept', given: kept.length, wanted: blockElements },
      );
    }
    refuseMoreThanTwo(operand, headDim, kept);
    this.operand = operand;
    const shape = [kept.length / blockElements, blockTokens, headDim] as const;
    this.kept = device.tensor('u8', ['kvHead', 'blockToken', 'dim'], shape, kept);
  }

  dispose(): void {
    this.kept.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}

function refuseMoreThanTwo(operand: KvOperand, headDim: number, kept: Uint8Array): void {
  const [neighbour, lines] = operand === 'keys' ? [1, headDim] : [headDim, blockTokens];
  for (let first = 0; first < kept.length; first++) {
    // Whether a group of four neighbours begins here.
    const place = operand === 'keys' ? first % lines : Math.floor(first / headDim) % lines;
    if (place % 4 !== 0) continue;
    const group = [0, 1, 2, 3].map((index) => kept[first + index * neighbour] ?? 0);
    const count = group.filter((bit) => bit !== 0).length;
    if (count <= 2) continue;
    const token = Math.floor(first / headDim) % blockTokens;
    throw new CapabilityError(
      `The mask of ${operand} keeps ${count} of the four neighbours from token ${token}, dim ${
        first % headDim
      } on; ` +
        'sparse blocks hold two of each four. Use a mask of which that is true, such as 2:4, 1:4 or 1:2.',
      { subject: 'kept', given: group, wanted: 'at most two of four' },
    );
  }
}
