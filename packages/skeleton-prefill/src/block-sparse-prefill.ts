import { blockSparseAttention, CapabilityError, prefillAttention } from '@kv/sparse-core';
import type {
  AttentionArguments,
  Device,
  KvLayer,
  KvStore,
  PrefillAttention,
  PrefillCall,
  PrefillReport,
  RopeDescription,
  RowBatchEntry,
  Stream,
  TensorHandle,
} from '@kv/sparse-core';
import { expectThat } from '@kv/sparse-core/native';

import { type BlockThreshold, keyBlockTokens } from './block-threshold.js';
import { isWorthEstimating } from './estimated-cost.js';
import type { PromptStep } from './estimated-cost.js';
import { isWhole } from './exact-tokens.js';
import type { BlockEstimate, SelectKeyBlocksOptions } from './operations/select-key-blocks.js';
import { selectKeyBlocks } from './operations/select-key-blocks.js';
import { type PromptState, PromptStates } from './prompt-states.js';

/** Rows of a query tile. */
export const tileRows = 128;
/** Of thresholds that say nothing of the share: what the cost is taken for. */
const usualShare = 0.25;

/** Why blocks were computed that would have been skipped: a step's, a sequence's, or some heads'. */
export type DenseReason =
  | 'the estimate would take longer than it saves'
  | 'tokens of the sequence were dropped'
  | 'heads had no finite estimate';

/** The rows of one sequence in a step, and its keys, the step's own included: the arguments of attention. */
export interface EstimatedRows extends Omit<AttentionArguments, 'output' | 'logSumExp' | 'causal'> {
  readonly layer: KvLayer;
  readonly rows: number;
  readonly tokens: number;
  readonly rope: RopeDescription;
  /** What earlier steps of the prompt left, so many bytes; empty at its first step. Gone after its last. */
  promptState(bytes: number): PromptState;
  /** Room for a part of the estimate. Heads of which nothing is known are those where it is NaN in the last row. */
  rowPart(): RowPart;
}

/** What one preset has of its own: how it estimates which blocks of keys count. */
export interface BlockSparseMethod {
  readonly name: string;
  /** How blocks are chosen by the estimate. */
  readonly select: Omit<SelectKeyBlocksOptions, 'tileRows' | 'denseRows' | 'threshold'> & { readonly threshold: BlockThreshold };
  /** Rows at a prompt's end, as far as they come in its last step, that attend to all keys. */
  readonly denseLastRows: number;
  /** The share of blocks that will be computed besides sinks and diagonal. Default: what the threshold says of it. */
  readonly share?: number | undefined;
  /** How many multiplications of dense attention take as long as the estimate of a step. */
  cost(kind: Device['kind'], step: PromptStep): number;
  /** How much of dense attention's time the estimate may take if nothing says how many blocks it leaves. Default: any. */
  readonly mostLost?: Readonly<Record<Device['kind'], number>> | undefined;
  /**
   * Enqueues the estimate, then calls `choose` once, with the tensors that `selectKeyBlocks` reads. They may be disposed
   * when it returns. A diagonal or a threshold given there holds in place of that of `select`.
   */
  estimate(stream: Stream, rows: EstimatedRows, choose: (estimate: BlockEstimate & OwnSelection) => void): void;
}

type OwnSelection = Partial<Pick<SelectKeyBlocksOptions, 'diagonalTokens' | 'threshold'>>;
type RowPart = TensorHandle<'f32', readonly ['queryHead', 'row']>;

/** A part of a batch, and why it is computed densely, if it is. */
interface Part {
  readonly index: number;
  readonly entry: RowBatchEntry;
  readonly fallback: DenseReason | undefined;
}

/** What was chosen for an entry. */
interface Chosen {
  /** `[queryHead, queryTile]` */
  readonly counts: Int32Array;
  readonly fallback: DenseReason | undefined;
}

/**
 * Attention of prompts over the blocks of keys that a method chooses: what all presets share. Works over any store that
 * keeps dense blocks of every token. Steps for which dense attention is faster, and sequences that had tokens dropped,
 * are computed densely, and the report says why.
 *
 * A store without dense blocks is refused by a CapabilityError.
 */
export function blockSparsePrefill(method: BlockSparseMethod): PrefillAttention {
  const { name, select, denseLastRows } = method;
  const { share = shareOf(select.threshold) } = method;
  const most = share === undefined ? method.mostLost : undefined;

  const lackingDense = (store: KvStore): CapabilityError =>
    new CapabilityError(
      `The prefill '${name}' reads dense blocks, which the store '${store.name}' does not keep. ` +
        'Use a store that keeps a prompt dense until it is complete, such as densePagedStore().',
      { subject: 'prefill', given: store.name, wanted: 'dense blocks' },
    );

  /** Why an entry is computed densely. */
  const fallbackOf = (stream: Stream, { store, rope }: PrefillCall, { slot, position, rows }: RowBatchEntry): DenseReason | undefined => {
    const { layer } = store;
    const tokens = position + rows;
    if (store.lengths(slot).some((length) => length !== tokens)) return 'tokens of the sequence were dropped';
    const { sinkTokens = 0, diagonalTokens = 0 } = select;
    const step = { layer, rows, tokens, rope, exactTokens: sinkTokens + diagonalTokens, share: share ?? usualShare };
    const { kind } = stream.device;
    const worthwhile = isWorthEstimating(step, method.cost(kind, step), most?.[kind]);
    return worthwhile ? undefined : 'the estimate would take longer than it saves';
  };

  /** Enqueues one entry over its blocks. */
  const attendSparsely = (stream: Stream, call: PrefillCall, attended: AttentionArguments, part: Part): Promise<Chosen> => {
    const { device } = stream;
    const { store: { layer }, rope } = call;
    const { index, entry } = part;
    const { slot, position, rows } = entry;
    const tokens = position + rows;
    const endsPrompt = call.endsPrompt[index] === true;
    const states = call.state instanceof PromptStates ? call.state : new PromptStates(device);
    const promptState = (bytes: number) => states.of(slot, position, bytes);
    const tiles = Math.ceil(rows / tileRows);
    using keyBlockCounts = device.tensor('i32', ['queryHead', 'queryTile'], [layer.queryHeads, tiles]);
    const lists = [layer.queryHeads, tiles, Math.ceil(tokens / keyBlockTokens)] as const;
    using keyBlocks = device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], lists);
    const rowParts: RowPart[] = [];
    const rowPart = () => {
      const part = device.tensor('f32', ['queryHead', 'row'], [layer.queryHeads, rows]);
      rowParts.push(part);
      return part;
    };
    try {
      method.estimate(stream, { ...attended, layer, rows, tokens, rope, promptState, rowPart }, (estimate) => {
        const denseRows = endsPrompt ? denseLastRows : 0;
        selectKeyBlocks(stream, { ...select, ...estimate, denseRows, tileRows, keyBlocks, keyBlockCounts });
      });
      blockSparseAttention(stream, { ...attended, keyBlocks, keyBlockCounts });
    } catch (error) {
      for (const part of rowParts) part.dispose();
      throw error;
    }
    if (states !== call.state) states.release(stream, slot);
    return chosen(keyBlockCounts.read(), blocksSeen(entry), rowParts[0]);
  };

  return {
    name,
    open: (_layer, { device }) => new PromptStates(device),
    expectStore(store) {
      if (store.denseBlocks() === undefined) throw lackingDense(store);
    },
    attend(stream, call) {
      const { store, batch, query, output, scale } = call;
      const blocks = store.denseBlocks(batch.entries.map(({ slot }) => slot));
      if (blocks === undefined) throw lackingDense(store);
      const parts = batch.entries.map((entry, index) => ({ index, entry, fallback: fallbackOf(stream, call, entry) }));
      const attended = (index: number, end: number): AttentionArguments => {
        const [slots, queryStart] = [batch.slots.slice('batch', index, end), batch.queryStart.slice('boundary', index, end + 1)];
        return { query, output, blocks, slots, queryStart, scale };
      };
      const choices: Promise<Chosen | undefined>[] = [];
      for (const part of parts) {
        const { index, fallback } = part;
        if (fallback === undefined) {
          choices.push(attendSparsely(stream, call, attended(index, index + 1), part));
          continue;
        }
        choices.push(Promise.resolve(undefined));
        // Those that follow each other are one call.
        if (index > 0 && parts[index - 1]?.fallback !== undefined) continue;
        const sparse = parts.findIndex((other) => other.index > index && other.fallback === undefined);
        prefillAttention(stream, attended(index, sparse === -1 ? parts.length : sparse));
      }
      batch.entries.forEach(({ slot }, index) => call.endsPrompt[index] === true && call.state?.release(stream, slot));
      return { report: reportOf(parts, choices, store.layer.queryHeads) };
    },
  };
}

/** @throws InvalidValueError when it is no number of rows */
export function expectDenseLastRows(subject: string, denseLastRows: number): void {
  expectThat(subject, 'denseLastRows', denseLastRows, isWhole(denseLastRows, 0, 2 ** 31 - 1), 'a whole number from 0 on');
}

function shareOf({ budget, epsilon }: BlockThreshold): number | undefined {
  return budget ?? (epsilon === 0 ? 1 : undefined);
}

/** How many blocks the tiles of an entry see, of one head. */
function blocksSeen({ position, rows }: RowBatchEntry): number {
  let seen = 0;
  for (let end = 0; end < rows; ) {
    end = Math.min(rows, end + tileRows);
    seen += Math.ceil((position + end) / keyBlockTokens);
  }
  return seen;
}

const sum = (numbers: ArrayLike<number>): number => Array.from(numbers).reduce((all, number) => all + number, 0);

/** The last row of a part is only read where a head took all the blocks that it sees, which is rare. */
async function chosen(read: Promise<Int32Array>, seen: number, part: RowPart | undefined): Promise<Chosen> {
  try {
    const counts = await read;
    if (part === undefined) return { counts, fallback: undefined };
    const [queryHeads, rows] = part.shape;
    const tiles = counts.length / queryHeads;
    const heads = Array.from({ length: queryHeads }, (_, head) => head);
    const full = heads.filter((head) => sum(counts.subarray(head * tiles, (head + 1) * tiles)) === seen);
    const last = full.length === 0 ? [] : await part.slice('row', rows - 1, rows).read();
    const unknown = full.some((head) => Number.isNaN(last[head]));
    return { counts, fallback: unknown ? 'heads had no finite estimate' : undefined };
  } finally {
    part?.dispose();
  }
}

/** Of blocks: how many were computed, and why not fewer. */
function reportOf(
  parts: readonly Part[],
  choices: readonly Promise<Chosen | undefined>[],
  queryHeads: number,
): PrefillReport | Promise<PrefillReport> {
  if (parts.every(({ fallback }) => fallback !== undefined)) return { density: 1, fallback: parts[0]?.fallback };
  const seen = parts.map(({ entry }) => blocksSeen(entry) * queryHeads);
  return Promise.all(choices).then((chosenOf) => {
    const computed = chosenOf.map((choice, index) => (choice === undefined ? (seen[index] ?? NaN) : sum(choice.counts)));
    const fallback = chosenOf.find((choice) => choice?.fallback !== undefined)?.fallback;
    return { density: sum(computed) / sum(seen), ...(fallback && { fallback }) };
  });
}
