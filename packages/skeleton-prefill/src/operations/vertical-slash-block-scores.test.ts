import { verticalSlashByDefinition } from '../testing/block-scores-by-definition.js';
import { describeBlockScores } from '../testing/describe-block-scores.js';
import { verticalSlashBlockScores } from './vertical-slash-block-scores.js';

// ln 2^-126: what is below counts as nothing.
describeBlockScores('verticalSlashBlockScores', verticalSlashBlockScores, verticalSlashByDefinition, { termsOf: (dim) => dim, least: -87 });
