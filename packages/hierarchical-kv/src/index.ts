export { type BlockMetadata, type BlockMetadataMaker, type BlockMetadataMethod, blockMetadataMethods, type BlocksToDescribe, metadataVectors } from './block-metadata-method.js';
export { type BlockOptions, hierarchicalDeviceBytes, hierarchicalHostBytes, type HierarchicalOptions, hierarchicalStore } from './hierarchical-store.js';
export type { BlockBatch, FixedBlocks } from './operations/block-batch.js';
export { blockMetadata, type BlockMetadataArguments } from './operations/block-metadata.js';
export { blockScores, type BlockScoresArguments } from './operations/block-scores.js';
export { fetchBlocks, type FetchBlocksArguments } from './operations/fetch-blocks.js';
export { placeBlocks, type PlaceBlocksArguments } from './operations/place-blocks.js';
export { type BlockCache, planBlocks, type PlanBlocksArguments, type PlannedBlocks, workingSetSteps } from './operations/plan-blocks.js';
export { type ChosenBlocks, selectTopBlocks, type SelectTopBlocksArguments } from './operations/select-top-blocks.js';
