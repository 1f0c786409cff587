import { describe, expect, test } from 'vitest';
import * as core from './index.js';

const classes = [
  [core.ShapeError, 'ShapeError', 'KV_SHAPE'],
  [core.DTypeError, 'DTypeError', 'KV_DTYPE'],
  [core.DeviceError, 'DeviceError', 'KV_DEVICE'],
  [core.OutOfMemoryError, 'OutOfMemoryError', 'KV_OUT_OF_MEMORY'],
  [core.ModelFormatError, 'ModelFormatError', 'KV_MODEL_FORMAT'],
  [core.CapabilityError, 'CapabilityError', 'KV_CAPABILITY'],
  [core.QueueFullError, 'QueueFullError', 'KV_QUEUE_FULL'],
  [core.DisposedError, 'DisposedError', 'KV_DISPOSED'],
  [core.InvalidValueError, 'InvalidValueError', 'KV_INVALID_VALUE'],
] as const;

describe.each(classes)('%o', (ErrorClass, name, code) => {
  test('carries its facts as fields', () => {
    const cause = new Error('below');
    const error = new ErrorClass('said', { subject: 'keys', given: [1, 2], wanted: [2, 2], cause });
    expect(error).toBeInstanceOf(core.KvError);
    expect(error).toMatchObject({ name, code, message: 'said', subject: 'keys', given: [1, 2], wanted: [2, 2], cause });
  });

  test('needs no details', () => {
    const error = new ErrorClass('said');
    expect(error.subject).toBeUndefined();
    expect('cause' in error).toBe(false);
  });
});
