import { pooledByDefinition } from '../testing/block-scores-by-definition.js';
import { describeBlockScores } from '../testing/describe-block-scores.js';
import { pooledBlockScores } from './pooled-block-scores.js';

describeBlockScores('pooledBlockScores', pooledBlockScores, pooledByDefinition, { termsOf: (dim) => dim + 64 });
