// Loads the addon that tools/sanitize.sh built, whichever platform package is asked for.
import Module from 'node:module';

const resolve = Module._resolveFilename;
Module._resolveFilename = function (request, ...rest) {
  const isAddon = /^@kv\/sparse-core-[a-z0-9]+-[a-z0-9]+(-cuda)?$/.test(request);
  return isAddon ? process.env.KV_SANITIZED_ADDON : resolve.call(this, request, ...rest);
};
