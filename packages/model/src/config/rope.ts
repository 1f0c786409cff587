import { CapabilityError, ModelFormatError } from '@kv/sparse-core';
import type { RopeScaling } from '@kv/sparse-core';

import { excerpt } from '@kv/sparse-core/native';
import type { RawConfig, RawRope } from './config-schema.js';
import type { RopeConfig } from './model-config.js';

const defaultTheta = 10_000;

/**
 * Reads the position embedding from either spelling: `rope_theta` with `rope_scaling`, or `rope_parameters`.
 * @throws ModelFormatError when a factor is missing or the spellings contradict each other
 * @throws CapabilityError for a kind of scaling that the runner does not compute
 */
export function readRope(file: string, raw: RawConfig, maxPositions: number): RopeConfig {
  const rope: RawRope = raw.rope_parameters ?? raw.rope_scaling ?? {};
  checkAgreement(file, raw);
  const partial = rope.partial_rotary_factor ?? raw.partial_rotary_factor ?? 1;
  if (partial !== 1) refuse(file, `partial_rotary_factor ${partial}`, 'heads that are rotated as a whole');
  return {
    theta: rope.rope_theta ?? raw.rope_theta ?? defaultTheta,
    scaling: readScaling(file, rope, maxPositions),
  };
}

function checkAgreement(file: string, { rope_parameters, rope_scaling, rope_theta }: RawConfig): void {
  const theta = rope_parameters?.rope_theta;
  if (theta != null && rope_theta != null && theta !== rope_theta) {
    malformed(file, 'rope_theta', `${rope_theta} beside ${theta} in rope_parameters`, 'one value');
  }
  if (rope_parameters != null && rope_scaling != null && kindOf(rope_parameters) !== kindOf(rope_scaling)) {
    const given = `'${kindOf(rope_scaling)}' beside '${kindOf(rope_parameters)}' in rope_parameters`;
    malformed(file, 'rope_scaling', given, 'one kind of scaling');
  }
}

function kindOf(rope: RawRope): string {
  return rope.rope_type ?? rope.type ?? 'default';
}

function readScaling(file: string, rope: RawRope, maxPositions: number): RopeScaling {
  const need = (field: 'factor' | 'low_freq_factor' | 'high_freq_factor'): number =>
    rope[field] ?? malformed(file, `rope scaling '${kindOf(rope)}'`, `no ${field}`, 'a positive number');
  switch (kindOf(rope)) {
    case 'default':
      return { kind: 'none' };
    case 'linear':
      return { kind: 'linear', factor: need('factor') };
    case 'llama3': {
      const lowFrequencyFactor = need('low_freq_factor');
      const highFrequencyFactor = need('high_freq_factor');
      if (highFrequencyFactor <= lowFrequencyFactor) {
        malformed(
          file,
          'high_freq_factor',
          String(highFrequencyFactor),
          `more than low_freq_factor ${lowFrequencyFactor}`,
        );
      }
      const originalMaxPositions = rope.original_max_position_embeddings ?? maxPositions;
      return {
        kind: 'llama3',
        factor: need('factor'),
        lowFrequencyFactor,
        highFrequencyFactor,
        originalMaxPositions,
      };
    }
    default:
      return refuse(file, `RoPE scaling '${excerpt(kindOf(rope))}'`, "'default', 'linear' or 'llama3'");
  }
}

function malformed(file: string, field: string, given: string, wanted: string): never {
  throw new ModelFormatError(`${file}: ${field}: given ${given}, wanted ${wanted}. Correct the config.`, {
    subject: field,
    given,
    wanted,
  });
}

function refuse(file: string, given: string, wanted: string): never {
  throw new CapabilityError(`${file}: the runner has no ${given}; it has ${wanted}. Choose another model.`, {
    subject: file,
    given,
    wanted,
  });
}
