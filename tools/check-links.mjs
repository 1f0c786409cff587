// Fails when a page links to a file or a heading that is not there, or names such a file in backticks.
import { execFileSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { headingAnchor } from './heading-anchor.mjs';

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

/** How links name the headings of a page. */
function anchorsOf(page) {
  const text = readFileSync(join(root, page), 'utf8').replace(/^```.*?^```/gms, '');
  return [...text.matchAll(/^#+ +(.+)$/gm)].map(([, title]) => headingAnchor(title));
}

function expectAnchor(page, path, anchor) {
  // A link to a folder shows its README.
  const target = [path, join(path, 'README.md')].find((each) => pages.includes(each.replace(/\/$/, '')));
  if (target === undefined || anchorsOf(target).includes(anchor)) return;
  console.error(`check-links: ${page} links to #${anchor} of ${target}, which has no such heading`);
  problems += 1;
}

for (const page of pages) {
  const text = readFileSync(join(root, page), 'utf8');
  for (const [, link, anchor] of text.matchAll(/\]\(([^)#\s]*)(?:#([^)]*))?\)/g)) {
    if (/^[a-z]+:/.test(link)) continue;
    const path = link === '' ? page : join(dirname(page), link);
    expectFile(page, path, link);
    if (anchor !== undefined) expectAnchor(page, path, anchor);
  }
  if (page === 'docs/moved.md') continue; // It names what was.
  for (const [, path] of text.matchAll(/`((?:native|packages|tools|docs)\/[\w./-]+)`/g)) expectFile(page, path, path);
}
console.log(`check-links: ${pages.length} pages, ${problems} problems`);
process.exitCode = problems === 0 ? 0 : 1;
