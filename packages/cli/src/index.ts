export type { CliStreams } from './command-context.js';
export { runCli } from './run-cli.js';
