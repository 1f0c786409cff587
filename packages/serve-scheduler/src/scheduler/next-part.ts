import type { PromptPart } from './batch.js';
import type { Request } from './request.js';
import type { Settings } from './scheduler-options.js';

/**
 * The next tokens and layers of a prompt (section 3.4): in layer segments whole layers, or tokens of one where a layer is too
 * long; otherwise tokens that pass all layers.
 * @param most tokens × layers
 * @returns undefined when not even a chunk fits
 */
export function nextPart(request: Request, { model, features, chunkTokens }: Settings, most: number): PromptPart | undefined {
  const { layers } = model;
  const { promptTokens, reusedTokens, nextToken: firstToken, nextLayer: firstLayer } = request;
  const newTokens = promptTokens - reusedTokens;
  const isWhole = features.layerSegments && firstToken === reusedTokens && most >= newTokens;
  const height = !features.layerSegments ? layers : isWhole ? Math.min(layers - firstLayer, Math.floor(most / newTokens)) : 1;
  const room = firstToken + Math.floor(most / height);
  // What another request read of a layer is not read in a part of this one: its parts are counted from there.
  const origin = features.layerSegments ? reusedTokens : 0;
  const endToken = promptTokens <= room ? promptTokens : origin + Math.floor((room - origin) / chunkTokens) * chunkTokens;
  if (endToken <= firstToken) return undefined;
  const endLayer = firstLayer + height;
  const isLast = endLayer === layers && endToken === promptTokens;
  return { request, firstToken, endToken, firstLayer, endLayer, isLast, isReplay: request.answered > 0 };
}

/** What is to be computed of it. */
export function tokenLayers({ firstToken, endToken, firstLayer, endLayer }: PromptPart): number {
  return (endToken - firstToken) * (endLayer - firstLayer);
}
