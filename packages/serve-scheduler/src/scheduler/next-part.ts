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
  const { promptTokens, nextToken: firstToken, nextLayer: firstLayer } = request;
  const isWhole = features.layerSegments && firstToken === 0 && most >= promptTokens;
  const height = !features.layerSegments ? layers : isWhole ? Math.min(layers - firstLayer, Math.floor(most / promptTokens)) : 1;
  const room = firstToken + Math.floor(most / height);
  const endToken = promptTokens <= room ? promptTokens : Math.floor(room / chunkTokens) * chunkTokens;
  if (endToken <= firstToken) return undefined;
  const endLayer = firstLayer + height;
  const isLast = endLayer === layers && endToken === promptTokens;
  return { request, firstToken, endToken, firstLayer, endLayer, isLast, isReplay: request.answered > 0 };
}

/** What is to be computed of it. */
export function tokenLayers({ firstToken, endToken, firstLayer, endLayer }: PromptPart): number {
  return (endToken - firstToken) * (endLayer - firstLayer);
}
