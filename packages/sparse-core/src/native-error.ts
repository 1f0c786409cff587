import {
  CapabilityError,
  DeviceError,
  DisposedError,
  InvalidValueError,
  KvError,
  type KvErrorDetails,
  ModelFormatError,
  OutOfMemoryError,
  ShapeError,
} from './errors.js';

const classes: Record<string, (new (message: string, details?: KvErrorDetails) => KvError) | undefined> = {
  KV_OUT_OF_MEMORY: OutOfMemoryError,
  KV_CAPABILITY: CapabilityError,
  KV_INVALID_VALUE: InvalidValueError,
  KV_MODEL_FORMAT: ModelFormatError,
  KV_DISPOSED: DisposedError,
  KV_DEVICE: DeviceError,
  KV_SHAPE: ShapeError,
};

/** Turns an error of the addon into the public class of its code. */
export function fromNative(error: unknown, details: KvErrorDetails = {}): unknown {
  if (!(error instanceof Error) || error instanceof KvError) return error;
  const ErrorClass = classes[(error as { code?: string }).code ?? ''];
  return ErrorClass === undefined ? error : new ErrorClass(error.message, { ...details, cause: error });
}
