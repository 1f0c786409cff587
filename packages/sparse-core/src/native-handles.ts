import type { ElementArray } from './dtype.js';
import type { MemoryStreams } from './memory-streams.js';

/** The native half of a tensor handle. A view does not own its memory. */
export interface NativeTensor {
  view(dtype: number, shape: readonly number[], strides: readonly number[], byteOffset: number): NativeTensor;
  /** Of the first element. */
  address(): number;
  release(): void;
}

/** What a stream repeats. */
export interface NativeRecording {
  /** Whether the stream's own order comes, at its end, after all that is recorded. */
  joined(): boolean;
  release(): void;
}

export interface NativeStream {
  beginRecording(): void;
  endRecording(): NativeRecording;
  replay(recording: NativeRecording): void;
  synchronize(): Promise<void>;
  waitFor(other: NativeStream, takesFailure: boolean): void;
  close(): void;
}

export type DeviceKind = 'cpu' | 'cuda';

/** Bytes, as `device.memory()` reports them. */
export interface MemoryReport {
  /** Held by tensors now. */
  readonly live: number;
  /** The most that `live` has been. */
  readonly peak: number;
  /** Working memory of kernels, of the device's kind; it stays for the next. Not part of `live`, nor of `limit`. */
  readonly scratch: number;
  /**
   * Pinned host memory: what copies to and from a GPU go through, made with its device, and host pools. 0 on the CPU,
   * where host pools are part of `live`.
   */
  readonly pinned: number;
  /** Allocations past this are refused. */
  readonly limit: number;
  /** A count, not bytes: tensors that the garbage collector had to release because nobody disposed them. */
  readonly finalized: number;
}

/** Host memory of which nothing is made at first. */
export interface NativeHostPool {
  /** Makes some more; the bytes made so far. One call at a time. */
  makeSlab(): Promise<number>;
  take(
    dtype: number,
    shape: readonly number[],
    strides: readonly number[],
    byteOffset: 0,
    bytes: number,
  ): NativeTensor;
  available(): number;
  release(): void;
}

export interface NativeDevice {
  allocate(
    dtype: number,
    shape: readonly number[],
    strides: readonly number[],
    byteOffset: 0,
    bytes: number,
    contents: ElementArray | undefined,
  ): NativeTensor;
  wrap(dtype: number, shape: readonly number[], strides: readonly number[], byteOffset: 0, memory: ElementArray): NativeTensor;
  hostPool(bytes: number): NativeHostPool;
  createStream(): NativeStream;
  memory(): MemoryReport;
  instructionSet(): InstructionSet;
  memoryReading(): Promise<{ readonly streams: MemoryStreams; readonly cache: 1 | 2; readonly requests: 1 | 6 }>;
  name(): string;
}

/** The builds of the CPU kernels, narrowest first. `amx` is avx512 with products on tile registers. */
export type InstructionSet = 'baseline' | 'avx2' | 'avx512' | 'amx';
