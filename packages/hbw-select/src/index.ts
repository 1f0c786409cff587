export { type Capacity, type PerLayer } from './capacity.js';
export { halo, type HaloSettings } from './halo.js';
export { type HeadShares } from './head-shares.js';
export { hbw, type HbwOptions, type HbwSettings } from './hbw.js';
export {
  type GroupReduction,
  observationScores,
  type ObservationScoresArguments,
  type ScoreDomain,
} from './operations/observation-scores.js';
export {
  keptTokens,
  selectTokens,
  type SelectTokensArguments,
  type SelectTokensRow,
} from './operations/select-tokens.js';
export { type ScorePooling, type SelectTokensOptions } from './select-options.js';
export { snapKv, type SnapKvSettings } from './snap-kv.js';
export { streaming, type StreamingSettings } from './streaming.js';
