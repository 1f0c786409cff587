import { describe, expect, it } from 'vitest';

import { runKv } from './testing/run-kv.js';
import { version } from './version.js';

describe('kv', () => {
  it('lists its commands', async () => {
    const { exitCode, stdout } = await runKv('--help');
    expect(exitCode).toBe(0);
    for (const command of ['generate', 'compare', 'bench', 'simulate', 'inspect', 'doctor'])
      expect(stdout).toMatch(new RegExp(`^ +${command}\\b`, 'm'));
  });

  it('tells its version', async () => {
    expect(await runKv('--version')).toEqual({ exitCode: 0, stdout: `${version}\n`, stderr: '' });
  });

  it.each([
    [['fly'], "unknown command 'fly'. kv --help lists the commands."],
    [['generat', 'model'], "unknown command 'generat'. Did you mean generate? kv --help lists the commands."],
    [['inspect'], "missing required argument 'model'. kv inspect --help lists its options."],
    [['inspect', 'model', '--loudly'], "unknown option '--loudly'. kv inspect --help lists its options."],
    [['--loudly'], "unknown option '--loudly'. kv --help lists the commands."],
  ])('refuses %j in one line', async (args, message) => {
    expect(await runKv(...args)).toEqual({ exitCode: 1, stdout: '', stderr: `kv: ${message}\n` });
  });
});
