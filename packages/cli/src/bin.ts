#!/usr/bin/env node
import { runCli } from './run-cli.js';

// A reader such as `head` may leave before the end.
process.stdout.on('error', (error: NodeJS.ErrnoException) => {
  if (error.code !== 'EPIPE') throw error;
  process.exit();
});

void runCli(process.argv.slice(2)).then((exitCode) => {
  process.exitCode = exitCode;
});
