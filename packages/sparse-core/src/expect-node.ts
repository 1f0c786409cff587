import { CapabilityError } from './errors.js';

const oldest = [20, 19] as const;

/**
 * Refuses a Node that is older than the packages are compiled for, before anything of them fails in a less clear way.
 * @throws CapabilityError
 */
export function expectNode(version = process.versions.node): void {
  const [major = 0, minor = 0] = version.split('.').map(Number);
  if (major > oldest[0] || (major === oldest[0] && minor >= oldest[1])) return;
  const wanted = oldest.join('.');
  throw new CapabilityError(`Node ${version} is too old for @kv; install Node ${wanted} or newer.`, {
    subject: 'Node',
    given: version,
    wanted,
  });
}
