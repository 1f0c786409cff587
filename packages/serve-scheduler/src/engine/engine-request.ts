import { CapabilityError, InvalidValueError } from '@kv/sparse-core';
import type { KvSelector, SampleSettings } from '@kv/sparse-core';
import { expectIndices, expectObject, expectOptions, expectSampleSettings, expectSelector, expectSignal, listOf, type OptionNames } from '@kv/sparse-core/native';
import type { Runner } from '@kv/model';

export interface EngineRequestOptions {
  /** Tokens of the answer. Default: as many as the context has room for, which also limits a larger number. At least 1. */
  readonly maxTokens?: number | undefined;
  /** How tokens are chosen; a draw follows from its seed and the token's position, whatever else is served. Default: always the most likely one. */
  readonly sampling?: SampleSettings | undefined;
  /** Token ids that end the answer, which they are the last token of: at most 65,536. Default: those of the model. */
  readonly endIds?: readonly number[] | undefined;
  /** What the cache keeps of the prompt. Default: as the policy says. */
  readonly select?: KvSelector | undefined;
  /**
   * Tokens of each kv head that a step of the answer reads, of a store that reads some of those it holds. At least its sinks, window,
   * newest block and one to choose; at most the store's own budget, which is the default.
   */
  readonly budgetTokens?: number | undefined;
  /** Ends the request, also while it waits; the loop over its tokens throws the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

export interface EngineTextOptions extends EngineRequestOptions {
  /** Texts that end the answer; they are not part of it. */
  readonly stop?: readonly string[] | undefined;
}

export const requestOptions: OptionNames<EngineRequestOptions> = {
  ...{ maxTokens: true, sampling: true, endIds: true },
  ...{ select: true, budgetTokens: true, signal: true },
};

/** A request's options with their defaults, checked. */
export interface EngineRequest {
  readonly maxTokens: number;
  readonly sampling: SampleSettings;
  readonly endIds: readonly number[];
  readonly select: KvSelector | undefined;
  readonly budgetTokens: number | undefined;
  readonly signal: AbortSignal | undefined;
}

const mostEndIds = 65_536;

/** @throws InvalidValueError, CapabilityError */
export function readRequest(runner: Runner, promptTokens: number, given: EngineRequestOptions): EngineRequest {
  expectOptions('generateTokens', given, requestOptions);
  const { maxTokens = runner.contextTokens, sampling = { temperature: 0 }, endIds = runner.model.config.eosIds } = given;
  const { select, budgetTokens, signal } = given;
  expectSignal('generateTokens', signal);
  expectSelector('generateTokens', select, runner.policy.prefill);
  if (runner.residency === undefined && budgetTokens !== undefined) {
    throw new CapabilityError(
      `generateTokens: budgetTokens is ${String(budgetTokens)}, and answers read all that the store '${runner.policy.store.name}' holds. ` +
        'Make the engine with a policy whose store reads some of it, or leave it out.',
      { subject: 'budgetTokens', given: budgetTokens },
    );
  }
  if (!Number.isInteger(maxTokens) || maxTokens < 1) {
    throw new InvalidValueError('generateTokens: maxTokens must be a whole number from 1 on.', { subject: 'maxTokens', given: maxTokens });
  }
  expectObject('generateTokens', 'sampling', sampling);
  const settings = { ...sampling };
  expectSampleSettings(settings);
  // The last token is not fed.
  const room = runner.contextTokens - promptTokens + 1;
  const ends = listOf('generateTokens', 'endIds', endIds, mostEndIds);
  expectIndices('generateTokens', 'endIds', ends, 2 ** 31);
  return { maxTokens: Math.min(maxTokens, room), sampling: settings, endIds: ends, select, budgetTokens, signal };
}
