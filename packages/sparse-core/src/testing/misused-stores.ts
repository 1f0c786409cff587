import type { KvStore, KvStoreFactory } from '../contracts/kv-store.js';
import { createRowBatch, type RowBatch, type RowBatchEntry } from '../contracts/row-batch.js';
import type { SelectionOutcomes } from '../contracts/token-selection.js';
import type { FloatDType } from '../dtype.js';
import { anyFinite, freeAxis, legalAt, type LegalValue, optional, rowsApart } from './legal-values.js';
import type { MisusedFunction } from './misuse.js';
import { encode } from './random.js';
import type { Device, Stream, Tensor } from '../handles.js';

const [kvHeads, queryHeads, headDim, held, scale] = [1, 2, 64, 70, 0.125];
const nextRow: RowBatchEntry = { slot: 0, position: held, rows: 1 };

type Rows<Head extends string> = Tensor<FloatDType, readonly ['token', Head, 'dim']>;

/** On a GPU rows have the dtype of the cache. */
function rowsOf<Head extends string>(device: Device, count: number, axis: Head, heads: number): Rows<Head> {
  const dtype = device.kind === 'cuda' ? 'f16' : 'f32';
  const data = encode(dtype, Array.from({ length: count * heads * headDim }, (_, index) => Math.sin(index)));
  return device.tensor(dtype, ['token', axis, 'dim'], [count, heads, headDim], data);
}

/** A batch of one row that is tried as a whole. */
class OneRow implements RowBatch {
  readonly entries: RowBatch['entries'];
  readonly rows: number;
  readonly slots: RowBatch['slots'];
  readonly queryStart: RowBatch['queryStart'];
  readonly positions: RowBatch['positions'];
  readonly #batch: RowBatch;

  constructor(device: Device, stream: Stream) {
    this.#batch = createRowBatch(device, stream, [nextRow]);
    const { entries, rows, slots, queryStart, positions } = this.#batch;
    this.entries = entries;
    this.rows = rows;
    this.slots = slots;
    this.queryStart = queryStart;
    this.positions = positions;
  }

  dispose(): void {
    this.#batch.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}

/** A store of three slots, of which the first holds 70 tokens and the rows of one more. */
class OpenStore implements Disposable {
  readonly store: KvStore;

  constructor(factory: KvStoreFactory, device: Device, stream: Stream) {
    const capacity = { device, slots: 3, tokensPerSlot: 128, tokens: 384 };
    const [store] = factory.create([{ index: 0, queryHeads, kvHeads, headDim }], capacity);
    if (store === undefined) throw new Error(`${factory.name} made no store`);
    this.store = store;
    using batch = createRowBatch(device, stream, [{ slot: 0, position: 0, rows: held }]);
    using keys = rowsOf(device, held, 'kvHead', kvHeads);
    store.prepare(stream, batch);
    store.append(stream, { batch, keys, values: keys });
    store.advance(batch);
    // A store with attention of its own has a prompt when it has attended to it.
    using query = rowsOf(device, held, 'queryHead', queryHeads);
    using output = rowsOf(device, held, 'queryHead', queryHeads);
    store.attend?.(stream, { batch, query, output, scale });
    using next = new OneRow(device, stream);
    store.prepare(stream, next);
    // Attention reads it.
    using row = rowsOf(device, 1, 'kvHead', kvHeads);
    store.append(stream, { batch: next, keys: row, values: row });
  }

  [Symbol.dispose](): void {
    this.store.dispose();
  }
}

const anyBatch = legalAt('(call\\.)?batch', 'a proxy', 'it stands for the batch behind it');
/** Tests of the operations try dtypes and strides on each device. */
const whereTaken = (rule: LegalValue): LegalValue => ({ ...rule, seldom: true });
const anyDType = whereTaken(legalAt('call\\.\\w+', 'f32|f16|bf16', 'where the device takes such rows'));
const anySlots = legalAt('slots', 'one entry (more|fewer)', 'any of the slots');

const someSlot = (_device: Device, stream: Stream) => ({ stream, slot: 0 });
const someSlots = () => ({ slots: [0, 1] });
const someBatch = (device: Device, stream: Stream) => ({ stream, batch: new OneRow(device, stream) });

function appended(device: Device, stream: Stream) {
  const rows = () => rowsOf(device, 1, 'kvHead', kvHeads);
  return { stream, call: { batch: new OneRow(device, stream), keys: rows(), values: rows() } };
}

function attended(device: Device, stream: Stream) {
  const rows = () => rowsOf(device, 1, 'queryHead', queryHeads);
  return { stream, call: { batch: new OneRow(device, stream), query: rows(), output: rows(), scale } };
}

const attention = {
  outputs: ['call.output'],
  legal: [anyBatch, whereTaken(rowsApart('call\\.(query|output)')), anyDType, anyFinite('call\\.scale')],
};

function selected(device: Device, stream: Stream) {
  const indices = device.tensor('i32', ['kvHead', 'kept'], [kvHeads, 3], Int32Array.of(1, 5, 69));
  const outcomes: SelectionOutcomes = device.tensor('i32', ['kvHead'], [kvHeads], new Int32Array(kvHeads));
  return { stream, slot: 0, selection: { indices, counts: [3] }, outcomes };
}

/**
 * Right calls of a store's methods, of those that it need not have only the ones that are named.
 * @param methods of the contract's optional ones
 */
export function misusedStore(
  make: () => KvStoreFactory,
  ...methods: ('attend' | 'finishPrefill' | 'makeDense')[]
): readonly MisusedFunction[] {
  const tried = <Args extends object>(
    method: string,
    args: (device: Device, stream: Stream) => Args,
    call: (store: KvStore, given: Args) => unknown,
    rules: Pick<MisusedFunction, 'outputs' | 'legal'> = {},
  ): MisusedFunction => ({
    name: `${method} of '${make().name}'`,
    args: (device, stream) => ({ self: new OpenStore(make(), device, stream), ...args(device, stream) }),
    call: ({ self, ...given }: Args & { self: OpenStore }) => {
      const result = call(self.store, given as unknown as Args);
      return result instanceof Promise ? result : undefined;
    },
    ...rules,
  });
  const optionalMethods = {
    attend: tried('attend', attended, (store, { stream, call }) => store.attend?.(stream, call), attention),
    finishPrefill: tried('finishPrefill', someSlot, (store, { stream, slot }) => store.finishPrefill?.(stream, slot)),
    makeDense: tried('makeDense', someSlot, (store, { stream, slot }) => store.makeDense?.(stream, slot)),
  };
  return [
    tried('prepare', someBatch, (store, { stream, batch }) => { store.prepare(stream, batch); }, { legal: [anyBatch] }),
    tried(
      'prepare, by entries,',
      (_device, stream) => ({ stream, entries: [{ ...nextRow }] }),
      (store, { stream, entries }) => { store.prepare(stream, { entries } as unknown as RowBatch); },
      {
        legal: [
          legalAt('entries', 'one entry fewer', 'there is nothing to make room for'),
          legalAt('entries\\.0\\.position', '\\d{10}', 'a store counts itself'),
        ],
      },
    ),
    tried(
      'advance',
      (device, stream) => ({ batch: new OneRow(device, stream) }),
      (store, { batch }) => { store.advance(batch); },
      { legal: [anyBatch] },
    ),
    tried('append', appended, (store, { stream, call }) => { store.append(stream, call); }, {
      legal: [anyBatch, anyDType, rowsApart('call\\.(keys|values)')],
    }),
    tried('startDecode', attended, (store, { stream, call }) => { store.startDecode(stream, call)(); }, attention),
    tried(
      'keep',
      selected,
      (store, { stream, slot, selection, outcomes }) => { store.keep(stream, slot, selection, outcomes); },
      { outputs: ['outcomes'], legal: [optional('outcomes'), rowsApart('selection\\.indices'), freeAxis('selection\\.indices', 'kept'), legalAt('outcomes', 'gaps within rows', 'one number has no gaps')] },
    ),
    tried(
      'truncate',
      (_device, stream) => ({ stream, slot: 0, tokens: 2 }),
      (store, { stream, slot, tokens }) => { store.truncate(stream, slot, tokens); },
    ),
    tried(
      'copy',
      (_device, stream) => ({ stream, slot: 0, toSlot: 1, dropped: 2 }),
      (store, { stream, slot, toSlot, dropped }) => store.copy?.(stream, slot, toSlot, dropped),
      { legal: [optional('dropped')] },
    ),
    tried('release', someSlot, (store, { stream, slot }) => { store.release(stream, slot); }),
    tried('lengths', () => ({ slot: 0 }), (store, { slot }) => store.lengths(slot)),
    tried('bytes', someSlots, (store, { slots }) => store.bytes(slots), { legal: [optional('slots'), anySlots] }),
    tried('denseBlocks', someSlots, (store, { slots }) => store.denseBlocks(slots), { legal: [optional('slots'), anySlots] }),
    ...methods.map((method) => optionalMethods[method]),
  ];
}
