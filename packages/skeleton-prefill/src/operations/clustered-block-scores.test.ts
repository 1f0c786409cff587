import { clusteredByDefinition } from '../testing/block-scores-by-definition.js';
import { describeBlockScores } from '../testing/describe-block-scores.js';
import { clusteredBlockScores } from './clustered-block-scores.js';

describeBlockScores('clusteredBlockScores', clusteredBlockScores, clusteredByDefinition, { termsOf: (dim) => dim + 64 });
