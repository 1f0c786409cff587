import { type AttentionPart, type KvBytes, mergeAttention, type Stream } from '@kv/sparse-core';
import type { BlockIds, LinkStream, SlotBlocks } from '@kv/sparse-core/native';
import { copyValues } from '../operations/copy-values.js';
import { decodeAttentionListed } from '../operations/decode-attention-listed.js';
import { loadValues } from '../operations/load-values.js';
import { selectByMass, type SelectByMassArguments } from '../operations/select-by-mass.js';
import { weightedValues } from '../operations/weighted-values.js';
import { type BlockCodec, type BlockMove, type DenseBlocks, listsOf, type NewBlock, type RowsOverBlocks, type StagedMove } from './block-codec.js';
import type { ChoiceRoom, GroupRoom } from './choice-room.js';
import type { HeadGroups } from './head-groups.js';
import type { HostBlocks } from './host-blocks.js';
import type { KeyCodec } from './key-format.js';
import type { StagedBlocks } from './staged-blocks.js';

/** How rows choose the tokens whose values they read. */
export type Choice = Pick<SelectByMassArguments, 'tau' | 'missingMass'>;

/** Blocks of all layers. */
export interface CodedPools {
  readonly ids: BlockIds;
  readonly blockBytes: KvBytes;
  /** Under the same numbers as among keys. */
  readonly host: HostBlocks;
  readonly staged: StagedBlocks | undefined;
}

/** What overlaps inside a layer. */
export interface Overlap {
  /** Undefined where one group is all. */
  readonly groups: HeadGroups | undefined;
  /** For what is summed on the host, where the device is another one: of each group, so that none waits for another's. */
  readonly links: readonly LinkStream[];
}

/** Keys of a layer in codes on the device, their values on the host. */
export class CodedBlocks implements BlockCodec {
  readonly ids: BlockIds;
  readonly blockBytes: KvBytes;
  readonly mostRows: number;
  readonly staged: StagedBlocks | undefined;
  readonly #index: number;
  readonly #keys: KeyCodec;
  readonly #pools: CodedPools;
  readonly #room: ChoiceRoom;
  readonly #choice: Choice;
  readonly #overlap: Overlap;

  /** @param index which layer of the cache it is */
  constructor(index: number, keys: KeyCodec, pools: CodedPools, room: ChoiceRoom, choice: Choice, overlap: Overlap) {
    this.ids = pools.ids;
    this.blockBytes = pools.blockBytes;
    this.mostRows = room.rows;
    this.staged = pools.staged;
    this.#index = index;
    this.#keys = keys;
    this.#pools = pools;
    this.#room = room;
    this.#choice = choice;
    this.#overlap = overlap;
  }

  encode(stream: Stream, dense: DenseBlocks, blocks: readonly NewBlock[]): void {
    const { keys: hostKeys } = this.#pools.host;
    const { from, to } = listsOf(blocks);
    if (hostKeys !== undefined) copyValues(stream, { values: dense.keys, hostValues: hostKeys, from, to });
    this.#encode(stream, dense, blocks);
    this.#copyValues(stream, dense.values, blocks);
  }

  encodeStaged(stream: Stream, dense: DenseBlocks, blocks: readonly (NewBlock & StagedMove)[]): void {
    this.#encode(stream, dense, blocks);
    if (this.staged?.sendsValues !== true) this.#copyValues(stream, dense.values, blocks);
    this.staged?.send(stream, dense, blocks);
  }

  decode(stream: Stream, { keys, values }: DenseBlocks, moves: readonly BlockMove[]): void {
    const { keys: hostKeys, values: hostValues, valueScales } = this.#pools.host;
    const { from, to } = listsOf(moves);
    if (hostKeys === undefined) this.#keys.decode(stream, keys, moves);
    else loadValues(stream, { values: keys, hostValues: hostKeys, from, to });
    loadValues(stream, { values, hostValues, valueScales, from, to });
  }

  write(stream: Stream, slot: number, blocks: SlotBlocks): void {
    this.#pools.host.means?.write(stream, this.#index, slot, blocks);
    this.#overlap.groups?.write(stream, slot, blocks);
  }

  attend(stream: Stream, rows: RowsOverBlocks, part: AttentionPart): void {
    const { groups, links } = this.#overlap;
    const room = this.#room.of(rows);
    // What belongs to a group lies together in a step of one row alone.
    if (groups === undefined || rows.query.shape[0] > 1) {
      this.#choose(stream, rows, part.logSumExp, room);
      this.#sum(stream, rows, room);
    } else this.#attendInGroups(stream, groups.of(rows), part.logSumExp);
    for (const link of links) link.join(stream);
    const { output, logSumExp, exact } = room;
    mergeAttention(stream, { ...part, other: { output, logSumExp: exact?.logSumExp ?? logSumExp } });
  }

  /** Each group's sums are beside the scores of the next ones. */
  #attendInGroups(stream: Stream, groups: readonly RowsOverBlocks[], denseLogSumExp: AttentionPart['logSumExp']): void {
    const { links } = this.#overlap;
    let firstHead = 0;
    groups.forEach((group, nth) => {
      const room = this.#room.of(group);
      const logSumExp = denseLogSumExp.slice('queryHead', firstHead, (firstHead += group.query.shape[1]));
      this.#choose(stream, group, logSumExp, room);
      this.#sum(links[nth]?.behind(stream) ?? stream, group, room);
    });
  }

  /** Enqueues what rows choose. */
  #choose(stream: Stream, rows: RowsOverBlocks, denseLogSumExp: AttentionPart['logSumExp'], room: GroupRoom): void {
    const { values, valueScales, means } = this.#pools.host;
    const { scores, valueRows, weights, counts, exact, logSumExp } = room;
    const ranges = this.#keys.findsRanges ? room.ranges : undefined;
    const { blockTable, keyCounts, slots, queryStart } = rows;
    this.#keys.score(stream, rows, scores, ranges);
    const batch = { blockTable, keyCounts, slots, queryStart, denseLogSumExp, scores, ranges };
    const choice = { ...this.#choice, valueRows, weights, counts, valueBlocks: values.shape[0] };
    if (exact === undefined) selectByMass(stream, { ...batch, ...choice, valueScales, meanRows: means?.rowsOf(this.#index), logSumExp });
    else {
      stream.copy(rows.query, exact.query);
      selectByMass(stream, { ...batch, ...choice, logSumExp: exact.logSumExp });
    }
  }

  /** Enqueues the sums on the host of what was chosen. */
  #sum(stream: Stream, { scale }: RowsOverBlocks, { valueRows, weights, counts, room, exact, output }: GroupRoom): void {
    const { keys, values, valueScales } = this.#pools.host;
    if (weights !== undefined) weightedValues(stream, { valueRows, weights, counts, values, output, ...room });
    if (keys === undefined || exact === undefined) return;
    decodeAttentionListed(stream, { ...exact, valueRows, counts, keys, values, valueScales, output, scale });
  }

  #encode(stream: Stream, { keys, values }: DenseBlocks, blocks: readonly NewBlock[]): void {
    this.#keys.encode(stream, keys, blocks);
    this.#pools.host.means?.add(stream, values, blocks);
  }

  #copyValues(stream: Stream, values: DenseBlocks['values'], blocks: readonly BlockMove[]): void {
    const { values: hostValues, valueScales } = this.#pools.host;
    const { from, to } = listsOf(blocks);
    copyValues(stream, { values, hostValues, valueScales, from, to });
  }
}
