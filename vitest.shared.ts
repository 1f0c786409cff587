import { availableParallelism } from 'node:os';
import { fileURLToPath } from 'node:url';
import type { ViteUserConfig } from 'vitest/config';

const conditions = ['@kv/source', 'node', 'import', 'default'];

/** How every package is tested: against the sources of its neighbours, with no build of them. */
export function packageTests(sources = 'src'): ViteUserConfig {
  const fromRoot = (path: string) => fileURLToPath(new URL(path, import.meta.url));
  return {
    // What tests share is not published, so no package exports it.
    resolve: { conditions, alias: { '@kv/sparse-core/testing': fromRoot('packages/sparse-core/src/testing/index.ts') } },
    ssr: { resolve: { conditions } },
    test: {
      include: [`${sources}/**/*.test.ts`],
      globalSetup: [fromRoot('vitest.global.ts')],
      setupFiles: [fromRoot('vitest.setup.ts')],
      environment: 'node',
      pool: 'forks',
      // A process of its own for every file would take half a second of each.
      isolate: false,
      // Most of a test is its oracle, on one thread.
      maxWorkers: availableParallelism(),
      // Only what hangs takes so long, also on a busy machine.
      testTimeout: 300_000,
      hookTimeout: 300_000,
      // All lines of two large arrays that differ throughout would take hours to compare.
      diff: { truncateThreshold: 1000 },
      server: { deps: { inline: [/^@kv\//] } },
    },
  };
}
