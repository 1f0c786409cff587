import { arch, availableParallelism, cpus, freemem, platform, totalmem } from 'node:os';

import { createDevice, cudaReport, DeviceError, devices, nativeBinary, rmsNorm } from '@kv/sparse-core';
import type { CudaReport, Device, DeviceKind, NativeBinary } from '@kv/sparse-core';

import type { CommandContext } from '../command-context.js';
import { describeDevice } from '../describe-device.js';
import { formatBytes, formatFacts } from '../format.js';
import { cpuFeatures, cudaParts } from '../machine.js';
import { version } from '../version.js';

/**
 * `kv doctor`: what this machine has, what was built, and whether they work together, which it finds out by
 * computing something on every device.
 * @throws CapabilityError when no native binary loads; DeviceError when a device computes the wrong thing
 */
export async function doctor({ stdout }: CommandContext): Promise<void> {
  const [name, runtimeVersion] = runtime(process.versions);
  stdout.write(
    formatFacts([
      ['kv', version],
      [name, `${runtimeVersion}, ${platform()} ${arch()}`],
      ['processor', `${cpus()[0]?.model ?? 'unknown'}, ${availableParallelism()} cores`],
      ['features', (await cpuFeatures()).join(' ') || 'none that the kernels use'],
      ['memory', `${formatBytes(totalmem())}, ${formatBytes(freemem())} free`],
    ]),
  );
  const binary = nativeBinary();
  const cuda = cudaReport();
  stdout.write(
    formatFacts([
      [
        'binary',
        `${binary.packageName} ${binary.version}, for ${cuda.built ? 'the CPU and CUDA' : 'the CPU only'}`,
      ],
      ['', binary.path],
    ]),
  );
  for (const kind of devices()) stdout.write(formatFacts(await tryDevice(kind)));
  stdout.write(formatFacts(describeAmx(binary.amx)));
  stdout.write(formatFacts(await describeCuda(cuda)));
  stdout.write('\nThis installation is usable.\n');
}

/** What runs this: Bun and Deno call themselves Node too. */
export function runtime({ bun, deno, node }: NodeJS.ProcessVersions): readonly [name: string, version: string] {
  if (bun !== undefined) return ['Bun', `${bun}, as Node ${node}`];
  return deno === undefined ? ['Node', `v${node}`] : ['Deno', `${deno}, as Node ${node}`];
}

/** Whether the tile registers of a processor that has them are used. */
export function describeAmx(amx: NativeBinary['amx']): [string, string][] {
  if (amx === 'absent') return [];
  return [['AMX', amx === 'ready' ? 'used' : 'not used: the system does not let this process use tile registers']];
}

/** Normalises (3, 4), whose root mean square is √12.5, on a device and describes it. */
async function tryDevice(kind: DeviceKind): Promise<[string, string][]> {
  const device = createDevice({ kind });
  using stream = device.createStream();
  using input = device.tensor('f32', ['token', 'hidden'], [1, 2], Float32Array.of(3, 4));
  using weight = device.tensor('f32', ['hidden'], [2], Float32Array.of(1, 1));
  using output = device.tensor('f32', ['token', 'hidden'], [1, 2]);
  rmsNorm(stream, { input, weight, output, epsilon: 2 ** -40 });
  const computed = await output.read(stream);
  const wanted = [3 / Math.sqrt(12.5), 4 / Math.sqrt(12.5)];
  // A few roundings of f32 on values below 2; the epsilon is below them.
  if (wanted.some((value, index) => Math.abs(value - (computed[index] ?? NaN)) > 2 ** -22)) {
    throw new DeviceError(
      `The device '${kind}' computed ${computed.join(', ')} where ${wanted.join(', ')} was wanted. ` +
        'Reinstall the native binary; if that does not help, report it with the lines above.',
      { subject: kind, given: computed, wanted },
    );
  }
  const works: [string, string] = ['device', `${describeDevice(device)}: works`];
  return kind === 'cpu' ? [works, ['', await describeReading(device)]] : [works];
}

async function describeReading(device: Device): Promise<string> {
  const streams = await device.memoryStreams();
  const requests = await device.prefetchRequests();
  const rows = streams === 1 ? '1 row' : `${streams} rows`;
  const often = requests === 1 ? 'once' : `${requests} times`;
  return `reads ${rows} of weights at once, asked for ${often} in cache ${await device.prefetchCache()}`;
}

async function describeCuda({ devices, reason }: CudaReport): Promise<[string, string][]> {
  const { compiler, driver, gpus } = await cudaParts();
  return [
    ['CUDA', devices.length > 0 ? 'used' : `not used: ${reason}`],
    ['', `compiler: ${compiler ?? 'no nvcc on the PATH'}`],
    ['', `driver: ${driver ?? 'none'}`],
    ['', `GPU: ${gpus.length === 0 ? 'none found' : gpus.join(', ')}`],
  ];
}
