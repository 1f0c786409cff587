// Runs before a platform package is packed, in its folder: without its binary there is nothing to publish.
import { existsSync, readFileSync } from 'node:fs';

const { name, main } = JSON.parse(readFileSync('package.json', 'utf8'));
if (!existsSync(main)) {
  const cuda = name.endsWith('-cuda') ? 'on' : 'off';
  console.error(`${name} has no ${main} to pack; build it with "KV_CUDA=${cuda} node tools/build-native.mjs".`);
  process.exitCode = 1;
}
