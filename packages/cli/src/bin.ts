#!/usr/bin/env node
import('./run-cli.js')
  .then(({ runCli }) => runCli(process.argv.slice(2)))
  .then(
    (exitCode) => (process.exitCode = exitCode),
    (error: unknown) => {
      const { code, message } = error as NodeJS.ErrnoException;
      // What this machine cannot run says so when it is imported.
      if (code !== 'KV_CAPABILITY') throw error;
      process.stderr.write(`kv: ${message}\n`);
      process.exitCode = 1;
    },
  );
