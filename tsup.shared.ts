import type { Options } from 'tsup';

/** How every package is built: ESM, CommonJS and declarations of both. */
export const packageBuild: Options = {
  entry: ['src/index.ts'],
  format: ['esm', 'cjs'],
  // tsup passes `baseUrl`, which TypeScript 6 deprecates, and compiles one entry, which `composite` forbids.
  dts: { compilerOptions: { ignoreDeprecations: '6.0', composite: false } },
  // Gives the CommonJS build an `import.meta.url`.
  shims: true,
  sourcemap: true,
  clean: true,
  target: 'node20',
  tsconfig: 'tsconfig.lib.json',
};
