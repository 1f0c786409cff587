#!/usr/bin/env node
import('./run-cli.js')
  .then(({ runCli }) => runCli(process.argv.slice(2)))
  .then(
    (exitCode) => (process.exitCode = exitCode),
    (error: NodeJS.ErrnoException) => {
      // What this machine cannot run says so when it is imported.
      if (error.code !== 'KV_CAPABILITY') throw error;
      process.stderr.write(`kv: ${error.message}\n`);
      process.exitCode = 1;
    },
  );
