// Fails when a page links to a file that is not there, or names one in backticks.
import { execFileSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('..', import.meta.url));
const pages = execFileSync('git', ['ls-files', '--cached', '--others', '--exclude-standard', '--', '*.md'], {
  cwd: root,
  encoding: 'utf8',
})
  .split('\n')
  .filter(Boolean);

let problems = 0;
function expectFile(page, path, written) {
  // The operation that CONTRIBUTING takes as its example does not exist.
  if (existsSync(join(root, path)) || path.includes('block-top-k')) return;
  console.error(`check-links: ${page} names ${written}, which is not there`);
  problems += 1;
}

for (const page of pages) {
  const text = readFileSync(join(root, page), 'utf8');
  for (const [, link] of text.matchAll(/\]\(([^)#\s]+)(?:#[^)]*)?\)/g)) {
    if (!/^[a-z]+:/.test(link)) expectFile(page, join(dirname(page), link), link);
  }
  if (page === 'docs/moved.md') continue; // It names what was.
  for (const [, path] of text.matchAll(/`((?:native|packages|tools|docs)\/[\w./-]+)`/g)) expectFile(page, path, path);
}
console.log(`check-links: ${pages.length} pages, ${problems} problems`);
process.exitCode = problems === 0 ? 0 : 1;
