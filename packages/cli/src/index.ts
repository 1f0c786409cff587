export { type CliStreams, runCli } from './run-cli.js';
