// Shows that check-pages finds what is wrong with a block, and names where it stands.
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';

const tool = fileURLToPath(new URL('check-pages.mjs', import.meta.url));

const block = (language, code, before = '') => `${before}\n\n\`\`\`${language}\n${code}\n\`\`\`\n`;
const setup = "<!-- setup\nimport { createDevice } from '@kv/model';\n-->";
const notRun = '<!-- not run: for a test -->';

/** Every case is a page of its own; all are checked at once. */
const right = {
  'a whole example': block('js', "import { createDevice } from '@kv/model';\nconsole.log(createDevice().name);"),
  'a block behind a set-up': block('ts', 'const name: string = createDevice().name;', setup),
  'a block that is not run': block('js', "throw new Error('never');", notRun),
  'a command': block('sh', 'kv --version'),
  'an output, of no language': block('', 'no code (at all'),
};
const wrong = {
  'a block that throws': [block('js', "throw new Error('as it would');"), 'as it would'],
  'a block that ends with an error': [block('js', 'process.exitCode = 3;'), 'Command failed'],
  'using, which Node 20 does not parse': [block('js', 'using device = createDevice();', setup), 'SyntaxError'],
  'a name that is not exported': [block('js', "import { makeDevice } from '@kv/model';"), 'makeDevice'],
  'a wrong option': [block('ts', "createDevice({ kind: 'abacus' });", setup), 'abacus'],
  'a wrong option of a block that is not run': [block('js', 'createDevice({ treads: 2 });', `${setup}\n\n${notRun}`), 'treads'],
  'a variable that is nowhere': [block('ts', 'console.log(device);'), "'device'"],
  'a command that fails': [block('sh', 'false | true'), 'Command failed'],
  'a command that is none': [block('sh', 'no-such-command'), 'no-such-command'],
  'a script that does not parse and is not run': [block('sh', 'if true; do', notRun), 'syntax error'],
  'an unknown language': [block('bash', 'true'), "'bash'"],
};

test('check-pages', async (context) => {
  const folder = mkdtempSync(join(tmpdir(), 'kv-pages-'));
  const all = [...Object.entries(right), ...Object.entries(wrong)];
  const pages = all.map(([name, content]) => {
    const page = join(folder, `${name.replaceAll(/\W+/g, '-')}.md`);
    writeFileSync(page, [content].flat()[0]);
    return page;
  });
  const { status, stdout, stderr } = spawnSync(process.execPath, [tool, ...pages], { encoding: 'utf8' });
  rmSync(folder, { recursive: true });
  const found = stderr.split(/^check-pages: /m);
  const saidOf = (name) => found.find((said) => said.includes(`/${name.replaceAll(/\W+/g, '-')}.md:`));

  for (const name of Object.keys(right)) {
    await context.test(`takes ${name}`, () => assert.equal(saidOf(name), undefined));
  }
  for (const [name, [, reason]] of Object.entries(wrong)) {
    await context.test(`refuses ${name}`, () => {
      const said = saidOf(name);
      assert.ok(said?.includes(reason), `'${reason}' in: ${said}`);
      assert.match(said, /\.md:\d+: /);
    });
  }
  await context.test('fails when one block does', () => assert.equal(status, 1));
  await context.test('counts', () => assert.match(stdout, /^check-pages: \d+ blocks run, \d+ parsed, 11 failed$/m));
});
