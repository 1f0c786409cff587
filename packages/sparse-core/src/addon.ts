import type { ElementArray } from './dtype.js';
import type { MemoryStreams } from './memory-streams.js';
import type { DeviceKind, InstructionSet, NativeDevice, NativeStream, NativeTensor } from './native-handles.js';

/** keys, values, blockTable, keyCounts, slots, queryStart: as `native/bindings/paged-batch.h` reads them. */
export type NativePagedRows = readonly [
  keys: NativeTensor,
  values: NativeTensor,
  blockTable: NativeTensor,
  keyCounts: NativeTensor,
  slots: NativeTensor,
  queryStart: NativeTensor,
];

/** As `native/bindings/paged-batch.h` reads the arguments of attention, behind the stream. */
export type NativeAttentionArguments = readonly [
  query: NativeTensor,
  output: NativeTensor,
  logSumExp: NativeTensor | undefined,
  ...NativePagedRows,
  scale: number,
  causal: boolean,
];

/** As `native/bindings/prefill-block-scores.h` reads them, behind the stream. */
export type NativeBlockScoresArguments = readonly [
  query: NativeTensor,
  scores: NativeTensor,
  ...NativePagedRows,
  scale: number,
];

type NativeAttention = (stream: NativeStream, ...rest: NativeAttentionArguments) => void;

/** As `native/bindings/blocks-24.h` reads them; the block table of the paged rows is the map of the keys. */
export interface NativeBlocks24 {
  readonly valueTable: NativeTensor;
  readonly keyNonZeros: NativeTensor;
  readonly valueNonZeros: NativeTensor;
  readonly keyMetadata: NativeTensor;
  readonly valueMetadata: NativeTensor;
  readonly hasSparseKeys: boolean;
  readonly hasSparseValues: boolean;
}

type NativeAttention24 = (
  stream: NativeStream,
  ...rest: readonly [...NativeAttentionArguments, blocks: NativeBlocks24]
) => void;

/** What there is of CUDA, and why there is no more. */
export interface CudaReport {
  /** Whether this binary has CUDA kernels. */
  readonly built: boolean;
  /** Why there is no device; empty when there is one. */
  readonly reason: string;
  readonly devices: readonly {
    readonly name: string;
    /** Such as '9.0'. */
    readonly computeCapability: string;
    readonly multiprocessors: number;
    /** Bytes. */
    readonly memory: number;
  }[];
}

/** Between dense blocks and quantized ones. */
export type NativeQuantization = (
  stream: NativeStream,
  keys: NativeTensor,
  values: NativeTensor | undefined,
  quantizedKeys: NativeTensor,
  quantizedValues: NativeTensor | undefined,
  keyBits: number,
  valueBits: number,
  rotated: boolean,
  copies: NativeTensor,
) => void;

/** Between dense blocks of keys and coded ones. */
type NativeKeyCodingArguments = readonly [
  keys: NativeTensor,
  codedKeys: NativeTensor,
  centroids: NativeTensor,
  channelScale: NativeTensor | undefined,
  codeBits: number,
  copies: NativeTensor,
];

/** What `native/bindings/addon.cc` exports. */
export interface Addon {
  readonly NativeDevice: new (
    kind: DeviceKind,
    index: number,
    threads: number,
    instructionSet: InstructionSet | undefined,
    memoryLimit: number,
    memoryStreams: MemoryStreams | undefined,
  ) => NativeDevice;
  readonly instructionSet: InstructionSet;
  readonly amx: () => 'absent' | 'refused' | 'ready';
  /** That of the package that it was built for. */
  readonly version: string;
  antidiagonalBlockScores(stream: NativeStream, ...rest: readonly [...NativeBlockScoresArguments, stride: number]): void;
  appendKv(
    stream: NativeStream,
    keys: NativeTensor,
    values: NativeTensor,
    ...rest: readonly [
      ...NativePagedRows,
      ...([] | [query: NativeTensor, positions: NativeTensor, frequencies: NativeTensor, interleaved: boolean, scale: number]),
    ]
  ): void;
  blockMetadata(stream: NativeStream, keys: NativeTensor, blockTable: NativeTensor, keyCounts: NativeTensor,
    slots: NativeTensor, queryStart: NativeTensor, metadataTable: NativeTensor, metadata: NativeTensor,
    values: NativeTensor | undefined, checksums: NativeTensor | undefined, rows: number, method: number): void;
  blockScores(stream: NativeStream, query: NativeTensor, scores: NativeTensor, metadata: NativeTensor,
    blockTable: NativeTensor, keyCounts: NativeTensor, slots: NativeTensor, queryStart: NativeTensor, blockTokens: number): void;
  blockSparseAttention(
    stream: NativeStream,
    ...rest: readonly [...NativeAttentionArguments, keyBlocks: NativeTensor, keyBlockCounts: NativeTensor]
  ): void;
  clusteredBlockScores(stream: NativeStream, ...rest: NativeBlockScoresArguments): void;
  codedKeyScores(
    stream: NativeStream,
    query: NativeTensor,
    scores: NativeTensor,
    codedKeys: NativeTensor,
    centroids: NativeTensor,
    channelScale: NativeTensor | undefined,
    codeBits: number,
    ranges: NativeTensor | undefined,
    blockTable: NativeTensor,
    keyCounts: NativeTensor,
    slots: NativeTensor,
    queryStart: NativeTensor,
    scale: number,
  ): void;
  compress24(
    stream: NativeStream,
    values: boolean,
    dense: NativeTensor,
    nonZeros: NativeTensor,
    metadata: NativeTensor,
    table: NativeTensor,
    prunings: NativeTensor,
    ids: NativeTensor,
    mostBlocks: number,
    elementMask: NativeTensor | undefined,
    blockLoss: NativeTensor | undefined,
  ): void;
  copy(stream: NativeStream, destination: NativeTensor, ...sources: NativeTensor[]): void;
  copyBlocks(stream: NativeStream, pool: NativeTensor, copies: NativeTensor): void;
  copyIndexMap(stream: NativeStream, keys: NativeTensor, values: NativeTensor, fromSlot: number, toSlot: number,
    copies: NativeTensor): void;
  copyValues(
    stream: NativeStream,
    values: NativeTensor,
    hostValues: NativeTensor,
    valueScales: NativeTensor | undefined,
    copies: NativeTensor,
  ): void;
  crossEntropy(stream: NativeStream, logits: NativeTensor, targets: NativeTensor, output: NativeTensor): void;
  cudaReport(): CudaReport;
  decodeAttention: NativeAttention;
  decodeAttention24: NativeAttention24;
  decodeAttentionListed(
    stream: NativeStream,
    query: NativeTensor,
    keys: NativeTensor,
    values: NativeTensor,
    valueScales: NativeTensor | undefined,
    valueRows: NativeTensor,
    counts: NativeTensor,
    output: NativeTensor,
    logSumExp: NativeTensor,
    scale: number,
  ): void;
  decodeAttentionQuantized(
    stream: NativeStream,
    query: NativeTensor,
    output: NativeTensor,
    logSumExp: NativeTensor | undefined,
    quantizedKeys: NativeTensor,
    quantizedValues: NativeTensor,
    blockTable: NativeTensor,
    keyCounts: NativeTensor,
    slots: NativeTensor,
    queryStart: NativeTensor,
    scale: number,
    keyBits: number,
    valueBits: number,
    merge: boolean,
  ): void;
  decodeKeys(stream: NativeStream, ...rest: NativeKeyCodingArguments): void;
  decomposeAttention(
    stream: NativeStream,
    query: NativeTensor,
    inverseFrequencies: NativeTensor,
    state: NativeTensor,
    slash: NativeTensor,
    vertical: NativeTensor,
    horizontal: NativeTensor,
    ...rest: readonly [
      ...NativePagedRows,
      scale: number,
      interleaved: boolean,
      attentionScale: number,
      seenTokens: number,
      sinkTokens: number,
      diagonalTokens: number,
      samples: number,
      seed: number,
      ridge: number,
      formulas: number,
    ]
  ): void;
  decompress24(
    stream: NativeStream,
    values: boolean,
    nonZeros: NativeTensor,
    metadata: NativeTensor,
    ids: NativeTensor,
    places: NativeTensor,
    dense: NativeTensor,
  ): void;
  dequantizeKv: NativeQuantization;
  embedding(
    stream: NativeStream,
    table: NativeTensor,
    ids: NativeTensor,
    output: NativeTensor,
    nanOutside: boolean,
  ): void;
  encodeKeys(stream: NativeStream, ...rest: readonly [...NativeKeyCodingArguments, index: NativeTensor]): void;
  fetchBlocks(stream: NativeStream, hostKeys: NativeTensor, hostValues: NativeTensor, keys: NativeTensor, values: NativeTensor,
    loads: NativeTensor, loadCount: NativeTensor, checksums: NativeTensor | undefined): void;
  forgetBlocks(stream: NativeStream, blockTable: NativeTensor, keyCounts: NativeTensor, where: NativeTensor, blockTokens: number): void;
  gatherKv(
    stream: NativeStream,
    keys: NativeTensor,
    values: NativeTensor,
    blockTable: NativeTensor,
    keyCounts: NativeTensor,
    indices: NativeTensor,
    counts: NativeTensor,
    outcomes: NativeTensor | undefined,
  ): void;
  indexCentroids(stream: NativeStream, centroids: NativeTensor, index: NativeTensor): void;
  linear(
    stream: NativeStream,
    input: NativeTensor,
    rows: NativeTensor | undefined,
    accumulate: boolean,
    swiglu: boolean,
    /** weight, bias and output of each layer */
    ...layers: readonly (NativeTensor | undefined)[]
  ): void;
  loadValues(
    stream: NativeStream,
    values: NativeTensor,
    hostValues: NativeTensor,
    valueScales: NativeTensor | undefined,
    copies: NativeTensor,
  ): void;
  mapFile(device: NativeDevice, path: string): Promise<{ tensor: NativeTensor; byteLength: number }>;
  mergeAttention(
    stream: NativeStream,
    output: NativeTensor,
    logSumExp: NativeTensor,
    otherOutput: NativeTensor,
    otherLogSumExp: NativeTensor,
  ): void;
  observationScores(
    stream: NativeStream,
    query: NativeTensor,
    scores: NativeTensor,
    ...rest: readonly [...NativePagedRows, scale: number, domain: number, reduction: number]
  ): void;
  placeBlocks(stream: NativeStream, blockTable: NativeTensor, keyCounts: NativeTensor, slots: NativeTensor,
    queryStart: NativeTensor, sourceTable: NativeTensor, where: NativeTensor, holds: NativeTensor, usedAt: NativeTensor,
    loads: NativeTensor, loadCount: NativeTensor, rows: number, blockTokens: number, sinkBlocks: number, firstCached: number): void;
  planBlocks(stream: NativeStream, blockTable: NativeTensor, keyCounts: NativeTensor, slots: NativeTensor,
    queryStart: NativeTensor, chosen: NativeTensor, chosenCounts: NativeTensor, where: NativeTensor, holds: NativeTensor,
    usedAt: NativeTensor, clock: NativeTensor, history: NativeTensor, demand: NativeTensor, readTable: NativeTensor,
    readCounts: NativeTensor, loads: NativeTensor, loadCount: NativeTensor, rows: number, blockTokens: number,
    sinkBlocks: number, recentBlocks: number): void;
  pooledBlockScores(stream: NativeStream, ...rest: NativeBlockScoresArguments): void;
  prefillAttention: NativeAttention;
  prefillAttention24: NativeAttention24;
  quantizedKeyScores(
    stream: NativeStream,
    query: NativeTensor,
    scores: NativeTensor,
    quantizedKeys: NativeTensor,
    blockTable: NativeTensor,
    keyCounts: NativeTensor,
    slots: NativeTensor,
    queryStart: NativeTensor,
    scale: number,
    keyBits: number,
    rotated: boolean,
  ): void;
  quantizeKv: NativeQuantization;
  read<T extends ElementArray>(stream: NativeStream, source: NativeTensor, destination: T): Promise<T>;
  rmsNorm(
    stream: NativeStream,
    input: NativeTensor,
    weight: NativeTensor,
    output: NativeTensor,
    epsilon: number,
  ): void;
  rope(
    stream: NativeStream,
    input: NativeTensor,
    positions: NativeTensor,
    inverseFrequencies: NativeTensor,
    output: NativeTensor,
    interleaved: boolean,
    attentionScale: number,
  ): void;
  runningMeans(
    stream: NativeStream,
    values: NativeTensor,
    sums: NativeTensor,
    means: NativeTensor,
    list: NativeTensor,
  ): void;
  sample(
    stream: NativeStream,
    logits: NativeTensor,
    recent: NativeTensor | undefined,
    output: NativeTensor,
    settings: Float64Array,
    outcomes: NativeTensor | undefined,
  ): void;
  selectByMass(
    stream: NativeStream,
    scores: NativeTensor,
    denseLogSumExp: NativeTensor | undefined,
    blockTable: NativeTensor,
    keyCounts: NativeTensor,
    slots: NativeTensor,
    queryStart: NativeTensor,
    valueScales: NativeTensor | undefined,
    meanRows: NativeTensor | undefined,
    valueRows: NativeTensor,
    weights: NativeTensor | undefined,
    counts: NativeTensor,
    logSumExp: NativeTensor,
    ranges: NativeTensor | undefined,
    valueBlocks: number,
    tau: number,
    missingMass: number,
  ): void;
  selectKeyBlocks(
    stream: NativeStream,
    slash: NativeTensor | undefined,
    vertical: NativeTensor | undefined,
    horizontal: NativeTensor | undefined,
    scores: NativeTensor | undefined,
    keyBlocks: NativeTensor,
    keyBlockCounts: NativeTensor,
    tileBlocks: NativeTensor | undefined,
    tokens: number,
    rows: number,
    tileRows: number,
    sinkTokens: number,
    diagonalTokens: number,
    denseRows: number,
    bound: number,
    rule: number,
    threshold: number,
    share: number,
  ): void;
  selectTokens(
    stream: NativeStream,
    scores: NativeTensor,
    rows: NativeTensor,
    indices: NativeTensor,
    counts: NativeTensor,
    rounds: Int32Array,
    overlappingRounds: boolean,
    fill: boolean,
    sinkTokens: number,
    pooling: number,
    poolTokens: number,
  ): void;
  selectTopBlocks(stream: NativeStream, scores: NativeTensor, keyCounts: NativeTensor, slots: NativeTensor,
    queryStart: NativeTensor, chosen: NativeTensor, chosenCounts: NativeTensor, budgets: NativeTensor, blockTokens: number,
    sinkBlocks: number, recentBlocks: number): void;
  swiglu(stream: NativeStream, gate: NativeTensor, up: NativeTensor, output: NativeTensor): void;
  trainCodebook(
    stream: NativeStream,
    keys: NativeTensor,
    scale: NativeTensor,
    means: NativeTensor,
    rounded: NativeTensor,
    counts: NativeTensor,
    channelScale: boolean,
    seed: number,
    batchVectors: number,
    firstIteration: number,
    iterations: number,
  ): void;
  transferBlocks(stream: NativeStream, source: NativeTensor, destination: NativeTensor, copies: Int32Array): void;
  verticalSlashBlockScores(stream: NativeStream, ...rest: NativeBlockScoresArguments): void;
  weightedValues(
    stream: NativeStream,
    valueRows: NativeTensor,
    weights: NativeTensor,
    counts: NativeTensor,
    values: NativeTensor,
    output: NativeTensor,
    hostValueRows: NativeTensor | undefined,
    hostWeights: NativeTensor | undefined,
    hostCounts: NativeTensor | undefined,
  ): void;
  write(stream: NativeStream, source: ElementArray, destination: NativeTensor): void;
  writeEntries(stream: NativeStream, table: NativeTensor, list: Int32Array): void;
}
