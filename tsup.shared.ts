import type { Options } from 'tsup';

/** How every package is built: ESM, CommonJS and declarations of both. `names` are the source files of its entries. */
export const packageBuild = (...names: string[]): Options => ({
  entry: names.map((name) => `src/${name}.ts`),
  format: ['esm', 'cjs'],
  // The compiler has checked the sources just before; from its declarations tsup makes one file an entry.
  // tsup passes `baseUrl`, which TypeScript 6 deprecates, and compiles one entry, which `composite` forbids.
  dts: {
    entry: Object.fromEntries(names.map((name) => [name, `out-tsc/${name}.d.ts`])),
    compilerOptions: { ignoreDeprecations: '6.0', composite: false },
  },
  // Gives the CommonJS build an `import.meta.url`.
  shims: true,
  sourcemap: true,
  clean: true,
  target: 'node20',
  tsconfig: 'tsconfig.lib.json',
});
