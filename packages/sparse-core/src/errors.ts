/** The closed set of codes that an error of this project carries. */
export type KvErrorCode =
  | 'KV_SHAPE'
  | 'KV_DTYPE'
  | 'KV_DEVICE'
  | 'KV_OUT_OF_MEMORY'
  | 'KV_MODEL_FORMAT'
  | 'KV_CAPABILITY'
  | 'KV_QUEUE_FULL'
  | 'KV_DISPOSED'
  | 'KV_INVALID_VALUE';

/** What an error says beyond its text, for programs: the same facts as fields. */
export interface KvErrorDetails {
  /** The operation, option, file or tensor that the error is about. */
  readonly subject?: string | undefined;
  /** What was given instead of what was wanted. */
  readonly given?: unknown;
  /** What would have been taken. */
  readonly wanted?: unknown;
  readonly cause?: unknown;
}

/** The root of every error that this project throws on purpose. */
export class KvError extends Error {
  override readonly name: string = 'KvError';
  readonly code: KvErrorCode;
  readonly subject: string | undefined;
  readonly given: unknown;
  readonly wanted: unknown;

  constructor(code: KvErrorCode, message: string, details: KvErrorDetails = {}) {
    super(message, details.cause === undefined ? undefined : { cause: details.cause });
    this.code = code;
    this.subject = details.subject;
    this.given = details.given;
    this.wanted = details.wanted;
  }
}

/** A tensor has the wrong rank, extent, stride or axis. */
export class ShapeError extends KvError {
  override readonly name = 'ShapeError';
  constructor(message: string, details?: KvErrorDetails) {
    super('KV_SHAPE', message, details);
  }
}

/** A tensor has the wrong element type. */
export class DTypeError extends KvError {
  override readonly name = 'DTypeError';
  constructor(message: string, details?: KvErrorDetails) {
    super('KV_DTYPE', message, details);
  }
}

/** A device is missing, failed, or is not the one that a tensor lives on. */
export class DeviceError extends KvError {
  override readonly name = 'DeviceError';
  constructor(message: string, details?: KvErrorDetails) {
    super('KV_DEVICE', message, details);
  }
}

/** An allocation did not fit; nothing was allocated. */
export class OutOfMemoryError extends KvError {
  override readonly name = 'OutOfMemoryError';
  constructor(message: string, details?: KvErrorDetails) {
    super('KV_OUT_OF_MEMORY', message, details);
  }
}

/** A model file or directory is malformed, incomplete or contradicts itself. */
export class ModelFormatError extends KvError {
  override readonly name = 'ModelFormatError';
  constructor(message: string, details?: KvErrorDetails) {
    super('KV_MODEL_FORMAT', message, details);
  }
}

/** A legal request that this build, device or combination of methods does not support. */
export class CapabilityError extends KvError {
  override readonly name = 'CapabilityError';
  constructor(message: string, details?: KvErrorDetails) {
    super('KV_CAPABILITY', message, details);
  }
}

/** A bounded queue refused more work. */
export class QueueFullError extends KvError {
  override readonly name = 'QueueFullError';
  constructor(message: string, details?: KvErrorDetails) {
    super('KV_QUEUE_FULL', message, details);
  }
}

/** A handle was used after its `dispose()`. */
export class DisposedError extends KvError {
  override readonly name = 'DisposedError';
  constructor(message: string, details?: KvErrorDetails) {
    super('KV_DISPOSED', message, details);
  }
}

/** An option or argument has a value outside its domain. */
export class InvalidValueError extends KvError {
  override readonly name = 'InvalidValueError';
  constructor(message: string, details?: KvErrorDetails) {
    super('KV_INVALID_VALUE', message, details);
  }
}
