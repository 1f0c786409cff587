import { execFile } from 'node:child_process';
import { readFile } from 'node:fs/promises';
import { promisify } from 'node:util';

/** The processor features that decide which build of the kernels runs. */
const kernelFeatures = ['avx2', 'fma', 'f16c', 'avx512f', 'avx512bw', 'avx512dq', 'avx512vl', 'amx_tile', 'amx_bf16'];

/** Those features that this processor has; none where the system does not list them. */
export async function cpuFeatures(): Promise<string[]> {
  const info = await readFile('/proc/cpuinfo', 'utf8').catch(() => '');
  const flags = new Set(/^flags\s*:(.*)$/m.exec(info)?.[1]?.split(/\s+/));
  return kernelFeatures.filter((feature) => flags.has(feature));
}

/** What CUDA needs, as far as this machine has it. */
export interface CudaParts {
  /** The release of nvcc. */
  readonly compiler: string | undefined;
  /** The version of the NVIDIA driver. */
  readonly driver: string | undefined;
  readonly gpus: readonly string[];
}

export async function cudaParts(): Promise<CudaParts> {
  const nvcc = await outputOf('nvcc', ['--version']);
  const listed = await outputOf('nvidia-smi', ['--query-gpu=driver_version,name', '--format=csv,noheader']);
  const rows = (listed ?? '').split('\n').flatMap((line) => {
    const [driver, name] = line.split(', ');
    return driver !== undefined && name !== undefined ? [{ driver, name }] : [];
  });
  return {
    compiler: nvcc && `nvcc ${/release ([\d.]+)/.exec(nvcc)?.[1] ?? '(release unknown)'}`,
    driver: rows[0]?.driver,
    gpus: rows.map(({ name }) => name),
  };
}

/** What a program prints; undefined when it is missing or fails. */
async function outputOf(command: string, args: readonly string[]): Promise<string | undefined> {
  try {
    return (await promisify(execFile)(command, args, { timeout: 10_000 })).stdout;
  } catch {
    return undefined;
  }
}
