import { join } from 'node:path';

import { CapabilityError, ModelFormatError } from '@kv/sparse-core';
import { describeValue, excerpt, isRecord, readJson, readOptionalJson } from '@kv/sparse-core/native';
import type { z } from 'zod';

import { expectDirectory } from '../expect-directory.js';
import { configSchema, generationConfigSchema } from './config-schema.js';
import type { RawConfig } from './config-schema.js';
import { familyDefaults, familyTraits, slidingWindow } from './families.js';
import type { ModelConfig, ModelFamily } from './model-config.js';
import { readRope } from './rope.js';

/**
 * Reads `config.json` and, where there is one, `generation_config.json` of a model directory.
 * @throws ModelFormatError when a file is missing or malformed or contradicts itself
 * @throws CapabilityError when the model is of a kind that the runner does not know
 */
export async function readModelConfig(directory: string): Promise<ModelConfig> {
  await expectDirectory(directory);
  const file = join(directory, 'config.json');
  const generationFile = join(directory, 'generation_config.json');
  const [json, generationJson] = await Promise.all([readJson(file), readOptionalJson(generationFile)]);
  const config = parseModelConfig(file, json);
  if (generationJson === undefined) return config;
  const { eos_token_id: eosIds } = validate(generationConfigSchema, generationFile, generationJson);
  return eosIds == null ? config : { ...config, eosIds: [eosIds].flat() };
}

/**
 * Turns the content of a config.json, old or new spelling, into a `ModelConfig`.
 * @param file where the content came from, for messages
 * @throws ModelFormatError, CapabilityError as `readModelConfig`
 */
export function parseModelConfig(file: string, json: unknown): ModelConfig {
  const family = readFamily(file, json);
  const raw = validate(configSchema, file, json);
  checkSupported(file, raw);
  const defaults = familyDefaults[family];
  const queryHeads = raw.num_attention_heads;
  const kvHeads = raw.num_key_value_heads ?? missing(raw.num_key_value_heads, defaults.kvHeads) ?? queryHeads;
  const headDim = raw.head_dim ?? defaults.headDim ?? raw.hidden_size / queryHeads;
  const maxPositions = raw.max_position_embeddings ?? defaults.maxPositions;
  if (queryHeads % kvHeads !== 0) {
    malformed(file, 'num_key_value_heads', kvHeads, `a divisor of num_attention_heads ${queryHeads}`);
  }
  if (headDim % 2 !== 0) {
    malformed(
      file,
      'head_dim',
      headDim,
      'an even whole number (where it is absent: hidden_size / num_attention_heads)',
    );
  }
  return {
    family,
    layers: raw.num_hidden_layers,
    hiddenSize: raw.hidden_size,
    queryHeads,
    kvHeads,
    headDim,
    intermediateSize: raw.intermediate_size,
    vocabularySize: raw.vocab_size,
    rmsNormEpsilon: raw.rms_norm_eps ?? 1e-6,
    rope: readRope(file, raw, maxPositions),
    tiedHead: raw.tie_word_embeddings ?? false,
    ...familyTraits(family, raw),
    maxPositions,
    slidingWindow: slidingWindow(family, raw),
    declaredDType: raw.dtype ?? raw.torch_dtype ?? null,
    bosId: raw.bos_token_id ?? missing(raw.bos_token_id, defaults.bosId),
    eosIds: [raw.eos_token_id ?? missing(raw.eos_token_id, defaults.eosId) ?? []].flat(),
  };
}

/** The family's default for an absent field; an explicit null means that the model has none. */
function missing(given: unknown, fallback: number | null): number | null {
  return given === undefined ? fallback : null;
}

function readFamily(file: string, json: unknown): ModelFamily {
  const type = isRecord(json) ? json.model_type : undefined;
  const families = Object.keys(familyDefaults).join(', ');
  if (typeof type !== 'string') malformed(file, 'model_type', type, `one of ${families}`);
  if (!Object.hasOwn(familyDefaults, type)) {
    throw new CapabilityError(`${file}: the runner has no model family '${excerpt(type)}'; it has ${families}.`, {
      subject: file,
      given: type,
      wanted: families,
    });
  }
  return type as ModelFamily;
}

function checkSupported(file: string, raw: RawConfig): void {
  const activation = raw.hidden_act ?? 'silu';
  if (activation !== 'silu') {
    throw new CapabilityError(`${file}: the runner has no activation '${excerpt(activation)}'; it has 'silu'.`, {
      subject: 'hidden_act',
      given: activation,
      wanted: 'silu',
    });
  }
  if (raw.quantization_config != null) {
    throw new CapabilityError(
      `${file}: the weights are quantized; the runner reads f32, f16 and bf16. Take the unquantized model.`,
      { subject: 'quantization_config', given: raw.quantization_config, wanted: 'f32, f16 or bf16 weights' },
    );
  }
}

function validate<Schema extends z.ZodType>(schema: Schema, file: string, json: unknown): z.infer<Schema> {
  const parsed = schema.safeParse(json);
  if (parsed.success) return parsed.data;
  const issue = parsed.error.issues[0];
  const field = issue?.path.join('.') ?? '';
  const given = (issue?.path ?? []).reduce<unknown>(
    (value, key) =>
      typeof value === 'object' && value !== null ? (value as Record<PropertyKey, unknown>)[key] : value,
    json,
  );
  const wanted = issue?.message.replace(/^.*?expected /, '').replace(/, received .*$/, '');
  return malformed(file, field, given, wanted ?? 'another value');
}

function malformed(file: string, field: string, given: unknown, wanted: string): never {
  throw new ModelFormatError(
    `${file}: ${field}: given ${describeValue(given)}, wanted ${wanted}. Correct the config or fetch it again.`,
    { subject: field, given, wanted },
  );
}
