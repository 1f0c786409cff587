// Fails when package-lock.json lacks an optional platform package (npm drops what a registry does not offer,
// and `npm ci` then refuses the file elsewhere) or names the registry it was made with.
import { readFileSync } from 'node:fs';

const { packages } = JSON.parse(readFileSync(new URL('../package-lock.json', import.meta.url), 'utf8'));

/** Whether `dependency`, wanted by the package at `path`, is found on the way up to the root. */
function isLocked(path, dependency) {
  for (let folder = path; ; folder = folder.replace(/(^|\/)(node_modules\/(@[^/]+\/)?[^/]+|packages\/[^/]+)$/, '')) {
    if (packages[`${folder ? `${folder}/` : ''}node_modules/${dependency}`]) return true;
    if (folder === '') return false;
  }
}

const problems = [];
for (const [path, entry] of Object.entries(packages)) {
  for (const dependency of Object.keys(entry.optionalDependencies ?? {})) {
    if (!isLocked(path, dependency)) problems.push(`${path} ${entry.version} lacks its optional ${dependency}`);
  }
  if (/^https?:/.test(entry.resolved ?? '')) problems.push(`${path} names a registry: ${entry.resolved}`);
}
for (const problem of problems) console.error(`check-lockfile: ${problem}`);
console.log(`check-lockfile: ${Object.keys(packages).length} entries, ${problems.length} problems`);
process.exitCode = problems.length === 0 ? 0 : 1;
