import { simulate } from '../simulator/simulate.js';
import type { SimulationResult } from '../simulator/simulate.js';
import { systems } from '../simulator/systems.js';
import type { SimulatedModel } from '../simulator/systems.js';
import { readTrace } from '../simulator/trace.js';

/** 8 layers of LWM-7B, whose cache has as many blocks of a layer as all 32 have in the paper's memory. */
const layers = 8;
const layerParameters = 4 * 4096 ** 2 + 3 * 4096 * 11_008;
const model: SimulatedModel = {
  ...{ layers, kvHeads: 32, queryHeads: 32, headDim: 128, hiddenSize: 4096, contextTokens: 16_384, maxRequests: 16 },
  parameters: layers * layerParameters + 32_000 * 4096,
  tokensPer: { word: 1, character: 1 },
  deviceBytes: 5.5 * 2 ** 30,
  hostBytes: 16 * 2 ** 30,
};
/** What the engine's store told of its layers on the device. */
const storeBlocks = 36_615;
/** Random weights: a step reads hardly anything because the one before did. 12 steps read 7,600 of the 8,000 blocks of 8K tokens. */
const locality = { replaced: 0.75, returning: 0, awaySteps: 1, exponent: 0 };

/** The simulator, on a trace that an engine served (`tools/gpu/serving-anchors.mjs`), with its requests so many times as fast. */
export async function simulateAnchor(traceText: string, system: 'base' | '+LP', speed: number, seed: number): Promise<SimulationResult> {
  const trace = readTrace(traceText).map((request) => ({ ...request, milliseconds: request.milliseconds / speed }));
  const features = systems[system];
  return await simulate({ model, features, trace, locality, seed, storeBlocks: features.offload ? storeBlocks : undefined });
}
