import { createRowBatch } from '@kv/sparse-core';
import type { Device, RowBatch, Stream } from '@kv/sparse-core';

import type { Phase } from './batch-entry.js';
import type { Sequence } from './sequence.js';

/** One sequence's rows of a chunk. */
export interface ChunkEntry {
  readonly sequence: Sequence;
  readonly phase: Phase;
  /** Of its first row, in the sequence. */
  readonly position: number;
  readonly rows: number;
}

/** The entries of a chunk that go through the same attention, and where in the chunk their rows are. */
export interface ChunkPart {
  readonly entries: readonly ChunkEntry[];
  readonly rows: RowBatch;
  readonly firstRow: number;
}

/** Rows of a batch that go through a layer together, those of prompts before those of answers. */
export interface BatchChunk {
  readonly entries: readonly ChunkEntry[];
  readonly rows: RowBatch;
  /** Of the batch. */
  readonly firstRow: number;
  readonly prefill: ChunkPart | undefined;
  readonly decode: ChunkPart | undefined;
}

/**
 * The entries of each chunk: all of them, or parts of the only one, of `chunkRows` rows from its first one. So what a prompt
 * gives does not depend on where its reading was interrupted.
 */
export function cutEntries(entries: readonly ChunkEntry[], chunkRows: number): (readonly ChunkEntry[])[] {
  const [only] = entries;
  if (only === undefined || entries.length > 1 || only.rows <= chunkRows) return [entries];
  const { sequence, phase, position, rows: all } = only;
  return Array.from({ length: Math.ceil(all / chunkRows) }, (_, index) => {
    const first = index * chunkRows;
    const rows = Math.min(chunkRows, all - first);
    return [{ sequence, phase: first + rows === all ? phase : 'prefill', position: position + first, rows }];
  });
}

type Own = <Kind extends Disposable>(made: Kind) => Kind;

/** Puts on the device whose rows they are. @throws OutOfMemoryError, InvalidValueError for a sequence that is there twice */
export function makeChunk(device: Device, stream: Stream, own: Own, entries: readonly ChunkEntry[], firstRow: number): BatchChunk {
  const rowsOf = (some: readonly ChunkEntry[]): RowBatch =>
    own(createRowBatch(device, stream, some.map(({ sequence, position, rows }) => ({ slot: sequence.slot, position, rows }))));
  const rows = rowsOf(entries);
  const prompts = entries.filter(({ phase }) => phase !== 'decode');
  const answers = entries.slice(prompts.length);
  const part = (some: readonly ChunkEntry[], first: number): ChunkPart | undefined => {
    if (some.length === 0) return undefined;
    return { entries: some, rows: some.length === entries.length ? rows : rowsOf(some), firstRow: first };
  };
  const promptRows = prompts.reduce((sum, entry) => sum + entry.rows, 0);
  return { entries, rows, firstRow, prefill: part(prompts, 0), decode: part(answers, promptRows) };
}

function batchesOf({ rows, prefill, decode }: BatchChunk): Set<RowBatch> {
  return new Set([rows, prefill?.rows, decode?.rows].filter((batch) => batch !== undefined));
}

export function bytesOfChunk(chunk: BatchChunk): number {
  let bytes = 0;
  for (const { slots, queryStart, positions } of batchesOf(chunk)) bytes += slots.byteLength + queryStart.byteLength + positions.byteLength;
  return bytes;
}

export function disposeChunk(chunk: BatchChunk): void {
  for (const batch of batchesOf(chunk)) batch.dispose();
}
