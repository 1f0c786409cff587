export {
  CapabilityError,
  DeviceError,
  DisposedError,
  DTypeError,
  InvalidValueError,
  KvError,
  ModelFormatError,
  OutOfMemoryError,
  QueueFullError,
  ShapeError,
  type KvErrorCode,
  type KvErrorDetails,
} from './errors.js';
