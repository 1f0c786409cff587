import { readFileSync } from 'node:fs';

/** Of a count in /proc, whatever the kernel's own clock is. */
const millisecondsPerTick = 10;

/** Milliseconds that another process has computed, to a tick; undefined where the system does not say. */
export function computingTime(pid: number | undefined): number | undefined {
  try {
    // The name, which is in brackets, may hold any character. Behind it come the state and ten other fields.
    const [, fields = ''] = /\) (.*)$/s.exec(readFileSync(`/proc/${String(pid)}/stat`, 'utf8')) ?? [];
    const [user, system] = fields.split(' ').slice(11, 13);
    return (Number(user) + Number(system)) * millisecondsPerTick;
  } catch {
    return undefined;
  }
}
