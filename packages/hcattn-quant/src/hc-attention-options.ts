import { CapabilityError, type FloatDType, HostPool } from '@kv/sparse-core';
import { expectBoolean, expectObject, expectOptions, expectThat, floats, type OptionNames, show } from '@kv/sparse-core/native';
import { PlacedCodebooks } from './codebooks/place-codebooks.js';
import type { MissingMass } from './operations/select-by-mass.js';
import type { CodeBits } from './quantized-blocks.js';

/** How keys or values are held on the device: in codes of 8 or 4 bits, with a scale of one byte for each 32. */
export type Codec = 'int8' | 'int4';

const codecs: readonly string[] = ['int8', 'int4'] satisfies Codec[];

/** How keys alone are held there. */
export type IntegerCodec = Codec | 'int3' | 'int2';

/** Of a code. */
export const bitsOf = { int8: 8, int4: 4, int3: 3, int2: 2 } as const satisfies Record<IntegerCodec, CodeBits>;

const isIntegerCodec = (keys: unknown): keys is IntegerCodec => typeof keys === 'string' && Object.hasOwn(bitsOf, keys);

/** How values are held on the host: as they are, or a token in 8 bits with a scale. */
export type HostValues = 'f16' | 'bf16' | 'int8';

const hostValues: readonly unknown[] = ['f16', 'bf16', 'int8'] satisfies HostValues[];

const missingMasses: readonly unknown[] = ['renormalise', 'paper', 'meanValue'] satisfies MissingMass[];

interface DenseOptions {
  /** First tokens that stay dense, rounded up to whole blocks of 64. Default: 0, with values on the host 4. */
  readonly sinkTokens?: number | undefined;
  /** Last tokens that stay dense, beside those of a block that is not full. Default: 64, with values on the host 128. */
  readonly localWindow?: number | undefined;
  /** Element type of what stays dense. Default: that of the rows if it has 16 bits, else f16. */
  readonly dtype?: FloatDType | undefined;
}

/** Keys and values as integer codes, on the device. */
export interface QuantizedOptions extends DenseOptions {
  readonly keys: Codec;
  readonly values: Codec;
  readonly valuesOn: 'device';
}

/** Keys as codes on the device, values in host memory. */
export interface CodedOptions extends DenseOptions {
  /**
   * `await placeCodebooks(device, codebooks)`, of the model whose keys come: codes are of these, and they must outlive the
   * stores. Or integer codes of 8, 4, 3 or 2 bits, with a scale of one byte for each 32.
   */
  readonly keys: PlacedCodebooks | IntegerCodec;
  /** Whether keys are rotated before they become integer codes. Default: yes. */
  readonly rotated?: boolean | undefined;
  /** 'f16' and 'bf16' are then what stays dense too. Default: the element type of what stays dense. */
  readonly values?: HostValues | undefined;
  readonly valuesOn: 'host';
  /**
   * Whether the keys themselves are on the host too, as what stays dense is. Answers then choose tokens by the codes and weight
   * them by their keys, and prompts and cuts read keys as they were. Takes 'renormalise'. Default: no.
   */
  readonly hostKeys?: boolean | undefined;
  /**
   * Of `hcAttentionHostBytes` or more. It may be disposed of once the stores are made. On the CPU it can be
   * left out, for all memory is the host's.
   */
  readonly hostPool?: HostPool | undefined;
  /**
   * The share of a row's attention that the tokens whose values are read must reach (Eq. 4); those that stay dense
   * are counted first. Default: 0.9.
   */
  readonly tau?: number | undefined;
  /**
   * What becomes of the weight of the others. 'meanValue', the mean of all values of the kv head that are on the host,
   * takes values of 16 or 32 bits. Default: 'renormalise'.
   */
  readonly missingMass?: MissingMass | undefined;
  /** The most tokens of a kv head whose values are read; of more, those of the largest weights. Default: all. */
  readonly maxTokens?: number | undefined;
}

export type HcAttentionOptions = QuantizedOptions | CodedOptions;

const name = 'hcAttentionStore';

const denseOptions: OptionNames<DenseOptions> = { sinkTokens: true, localWindow: true, dtype: true };

/** @throws InvalidValueError, CapabilityError */
export function expectStoreOptions(options: HcAttentionOptions): void {
  expectObject(name, 'options', options);
  const { sinkTokens, localWindow, dtype } = options;
  if (options.valuesOn === 'host') expectCoded(options);
  else expectQuantized(options);
  expectCount('sinkTokens', sinkTokens, 0);
  expectCount('localWindow', localWindow, 0);
  expectThat(name, 'dtype', dtype, dtype === undefined || floats.includes(dtype), floats.join(', '));
}

function expectQuantized(options: QuantizedOptions): void {
  const { keys, values, valuesOn } = options;
  const wanted = ['device', 'host'];
  if (!wanted.includes(valuesOn)) {
    throw new CapabilityError(`${name}: valuesOn is ${show(valuesOn)}; values can be on the 'device' or the 'host'.`, {
      subject: 'valuesOn',
      given: valuesOn,
      wanted,
    });
  }
  expectOptions(name, options, { ...denseOptions, keys: true, values: true, valuesOn: true });
  for (const [subject, given] of Object.entries({ keys, values })) {
    expectThat(name, subject, given, codecs.includes(given), `${codecs.join(' or ')}; with values on the 'host' keys may be int3, int2 or codes of codebooks, too`);
  }
}

function expectCoded(options: CodedOptions): void {
  expectOptions(name, options, {
    ...{ ...denseOptions, keys: true, rotated: true, values: true, valuesOn: true, hostKeys: true },
    ...{ hostPool: true, tau: true, missingMass: true, maxTokens: true },
  });
  const { keys, rotated, values, hostKeys, hostPool, tau, missingMass, maxTokens, dtype } = options;
  const areCodes = PlacedCodebooks.is(keys) || isIntegerCodec(keys);
  expectThat(name, 'keys', keys, areCodes, `codebooks of placeCodebooks(), or ${Object.keys(bitsOf).join(', ')}, where values are on the 'host'`);
  if (rotated !== undefined) expectBoolean(name, 'rotated', rotated);
  expectThat(name, 'rotated', rotated, rotated === undefined || isIntegerCodec(keys), 'left out with codebooks, which say what they are of');
  expectThat(name, 'values', values, values === undefined || hostValues.includes(values), hostValues.join(', '));
  const agrees = values === undefined || values === 'int8' || dtype === undefined || dtype === values;
  expectThat(name, 'dtype', dtype, agrees, `${show(values)} as the values, or left out`);
  expectThat(name, 'hostPool', hostPool, hostPool === undefined || HostPool.is(hostPool), 'a pool of hostPool()');
  const isShare = tau === undefined || (typeof tau === 'number' && tau > 0 && tau <= 1);
  expectThat(name, 'tau', tau, isShare, 'a share above 0, up to 1');
  const known = missingMass === undefined || missingMasses.includes(missingMass);
  expectThat(name, 'missingMass', missingMass, known, missingMasses.join(' or '));
  const hasMean = missingMass !== 'meanValue' || values !== 'int8';
  expectThat(name, 'missingMass', missingMass, hasMean, "'renormalise' or 'paper' where values are 'int8', which have no mean value");
  if (hostKeys !== undefined) expectBoolean(name, 'hostKeys', hostKeys);
  const renormalises = hostKeys !== true || missingMass === undefined || missingMass === 'renormalise';
  expectThat(name, 'missingMass', missingMass, renormalises, "'renormalise' with hostKeys, which weigh what was chosen alone");
  expectCount('maxTokens', maxTokens, 1);
}

function expectCount(subject: string, given: unknown, least: number): void {
  const counts = given === undefined || (Number.isSafeInteger(given) && (given as number) >= least);
  expectThat(name, subject, given, counts, `a whole number of tokens, ${least} or more`);
}
