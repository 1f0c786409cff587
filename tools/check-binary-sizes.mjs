// The binaries that were built here must be small enough to publish.
import { sizeProblem } from './build-native.mjs';

const problems = [false, true].map(sizeProblem).filter((problem) => problem !== undefined);
for (const problem of problems) console.error(problem);
if (problems.length > 0) process.exit(1);
console.log('binaries are small enough to publish');
