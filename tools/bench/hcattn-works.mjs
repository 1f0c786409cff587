// What hcattn.mjs times: dense decode attention over f16 keys and values, and what codes put in its place. Each work is
// one token's step of `layers` layers, recorded as the runner records it.
import { codedBlockBytes, codedKeyScores, decodeAttentionQuantized, quantizedBlockBytes, selectByMass, weightedValues } from '../../packages/hcattn-quant/dist/index.js';
import { decodeAttention } from '../../packages/sparse-core/dist/index.js';

const BLOCK = 64;
const CENTROIDS = 8192;
const CODE_BITS = 13;
/** Share of attention that each head's tokens reach, and the spread of scores with which they are about 5 % then. */
const TAU = 0.9;
const SCORE_SPREAD = 3.5;
/** Parts of a head's scores whose ranges are kept, as the store has them. */
const RANGE_PARTS = 256;
const PATTERN = 1 << 20;

const rowAxes = ['token', 'queryHead', 'dim'];
const poolAxes = ['block', 'blockToken', 'dim'];

/** `length` numbers that repeat the 2^20 of `element`. */
function repeated(array, length, element) {
  const pattern = array.from({ length: Math.min(length, PATTERN) }, (_, index) => element(index));
  const all = new array(length);
  for (let at = 0; at < length; at += PATTERN) all.set(at + PATTERN <= length ? pattern : pattern.subarray(0, length - at), at);
  return all;
}

/** Numbers from 0 to 1 that look random: a hash of the index. */
function noise(index) {
  let hash = Math.imul(index + 1, 0x9e3779b1);
  hash = Math.imul(hash ^ (hash >>> 15), 0x85ebca6b);
  hash = Math.imul(hash ^ (hash >>> 13), 0xc2b2ae35);
  return ((hash ^ (hash >>> 16)) >>> 0) / 2 ** 32;
}
const bits = new DataView(new ArrayBuffer(4));
/** The nearest f16 number to one of about 1, as bits. */
function half(number) {
  bits.setFloat32(0, number);
  const word = bits.getUint32(0);
  return Math.abs(number) < 2 ** -14 ? 0 : ((word >>> 16) & 0x8000) | ((((word & 0x7fffffff) + 0x1000 - 0x38000000) >>> 13) & 0x7fff);
}
const gaussian = (index) => Math.sqrt(-2 * Math.log(noise(2 * index) || 0.5)) * Math.cos(2 * Math.PI * noise(2 * index + 1));

/** A cache of one slot whose blocks are in order, and rows of one token. */
export class Shape {
  constructor(device, { heads, tokens, layers }) {
    this.device = device;
    this.stream = device.createStream();
    [this.queryHeads, this.kvHeads, this.headDim] = heads;
    this.tokens = tokens;
    this.layers = layers;
    this.blocks = (this.kvHeads * tokens) / BLOCK;
    const query = Float32Array.from({ length: this.queryHeads * this.headDim }, (_, index) => SCORE_SPREAD * gaussian(index));
    this.rows = {
      query: device.tensor('f32', rowAxes, [1, this.queryHeads, this.headDim], query),
      slots: device.tensor('i32', ['batch'], [1], Int32Array.of(0)),
      queryStart: device.tensor('i32', ['boundary'], [2], Int32Array.of(0, 1)),
    };
    this.output = this.#floats(rowAxes, [1, this.queryHeads, this.headDim]);
    this.scale = this.headDim ** -0.5;
    this.table = {
      blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [1, this.kvHeads, tokens / BLOCK], Int32Array.from({ length: this.blocks }, (_, block) => block)),
      keyCounts: device.tensor('i32', ['slot', 'kvHead'], [1, this.kvHeads], new Int32Array(this.kvHeads).fill(tokens)),
    };
  }

  #floats(axes, shape) {
    return this.device.tensor('f32', axes, shape);
  }

  /** `step(pools)` for each layer, recorded: enqueued one by one, the layers would take the threads' time from them. */
  #work(pools, step) {
    const all = Array.from({ length: this.layers }, pools);
    const recording = this.stream.record(() => all.forEach(step));
    return {
      run: async () => {
        this.stream.replay(recording);
        await this.stream.synchronize();
      },
      dispose: () => {
        recording.dispose();
        for (const tensor of all.flatMap(Object.values)) tensor.dispose();
      },
    };
  }

  #densePool() {
    const shape = [this.blocks, BLOCK, this.headDim];
    return this.device.tensor('f16', poolAxes, shape, repeated(Uint16Array, shape[0] * shape[1] * shape[2], (index) => half(gaussian(index))));
  }

  dense() {
    return this.#work(
      () => ({ keys: this.#densePool(), values: this.#densePool() }),
      (pools) => decodeAttention(this.stream, { ...this.rows, output: this.output, scale: this.scale, blocks: { ...pools, ...this.table } }),
    );
  }

  #quantizedPool(codeBits) {
    const shape = [this.blocks, quantizedBlockBytes(this.headDim, codeBits)];
    // As a code each of these bytes is good, and as a scale it is small.
    const bytes = repeated(Uint8Array, shape[0] * shape[1], (index) => Math.floor(noise(index) * 0x60));
    return this.device.tensor('u8', ['quantizedBlock', 'byte'], shape, bytes);
  }

  quantized(keyBits, valueBits) {
    return this.#work(
      () => ({ quantizedKeys: this.#quantizedPool(keyBits), quantizedValues: this.#quantizedPool(valueBits) }),
      (pools) => decodeAttentionQuantized(this.stream, { ...this.rows, output: this.output, scale: this.scale, ...pools, ...this.table, keyBits, valueBits }),
    );
  }

  #codedPools(groups) {
    const shape = [this.blocks, codedBlockBytes(groups, CODE_BITS)];
    const bytes = repeated(Uint8Array, shape[0] * shape[1], (index) => Math.floor(noise(index) * 256));
    bytes.fill(0, bytes.length - 8 * this.blocks); // no token is spoilt
    const bookShape = [this.kvHeads, 1, CENTROIDS, this.headDim / groups];
    const centroids = Uint16Array.from({ length: bookShape[0] * bookShape[2] * bookShape[3] }, (_, index) => half(gaussian(index)));
    return {
      codedKeys: this.device.tensor('u8', ['codedBlock', 'byte'], shape, bytes),
      centroids: this.device.tensor('f16', ['kvHead', 'book', 'centroid', 'subDim'], bookShape, centroids),
      values: this.#densePool(),
    };
  }

  /** Keys in `groups` codes, the choice of tokens, and the sum of their values. `chosen()` is their share. */
  coded(groups) {
    const group = this.queryHeads / this.kvHeads;
    const room = this.tokens / 8;
    const scores = this.#floats(['token', 'queryHead', 'key'], [1, this.queryHeads, this.tokens]);
    const list = {
      valueRows: this.device.tensor('i32', ['token', 'kvHead', 'chosen'], [1, this.kvHeads, room]),
      weights: this.#floats(['token', 'kvHead', 'chosen', 'groupHead'], [1, this.kvHeads, room, group]),
      counts: this.device.tensor('i32', ['token', 'kvHead'], [1, this.kvHeads]),
    };
    const ranges = this.#floats(['token', 'queryHead', 'part', 'bound'], [1, this.queryHeads, RANGE_PARTS, 2]);
    const logSumExp = this.#floats(['token', 'queryHead'], [1, this.queryHeads]);
    const work = this.#work(
      () => this.#codedPools(groups),
      ({ values, ...coded }) => {
        const { slots, queryStart } = this.rows;
        codedKeyScores(this.stream, { ...this.rows, ...coded, ...this.table, codeBits: CODE_BITS, scores, ranges, scale: this.scale });
        selectByMass(this.stream, { scores, ranges, ...this.table, slots, queryStart, valueBlocks: this.blocks, tau: TAU, ...list, logSumExp });
        weightedValues(this.stream, { ...list, values, output: this.output });
      },
    );
    const chosen = async () => (await list.counts.read()).reduce((sum, count) => sum + count, 0) / (this.kvHeads * this.tokens);
    return { ...work, chosen };
  }
}
