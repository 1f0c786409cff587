import js from '@eslint/js';
import nx from '@nx/eslint-plugin';
import { defineConfig, globalIgnores } from 'eslint/config';
import tseslint from 'typescript-eslint';

/** What a package of each floor may import: the floors below it, never a neighbour. */
const floors = {
  'sparse-core': [],
  method: ['sparse-core'],
  policies: ['sparse-core', 'method'],
  model: ['sparse-core'],
  scheduler: ['sparse-core', 'model'],
  application: ['sparse-core', 'method', 'policies', 'model', 'scheduler'],
  cli: ['sparse-core', 'method', 'policies', 'model', 'scheduler', 'application'],
};

/** esbuild lets the error that `using` remembers outlive a round of a loop, and the next round throws it again. */
const usingInLoop = {
  selector:
    ':matches(ForStatement, ForOfStatement, ForInStatement, WhileStatement, DoWhileStatement) TryStatement ' +
    '> BlockStatement > VariableDeclaration[kind=/using$/]',
  message: "Once compiled this throws an earlier round's error again; give the body of the loop a function.",
};

export default defineConfig(
  globalIgnores(['**/dist', '**/out-tsc', '**/build', '**/coverage', '**/.nx']),
  js.configs.recommended,
  tseslint.configs.strictTypeChecked,
  tseslint.configs.stylisticTypeChecked,
  {
    languageOptions: { parserOptions: { projectService: true, tsconfigRootDir: import.meta.dirname } },
    rules: {
      'max-lines': ['error', 500],
      // Numbers read well in messages as they are.
      '@typescript-eslint/no-confusing-void-expression': ['error', { ignoreArrowShorthand: true }],
      '@typescript-eslint/restrict-template-expressions': ['error', { allowNumber: true }],
    },
  },
  {
    files: ['packages/*/src/**/*.ts'],
    plugins: { '@nx': nx },
    rules: {
      '@nx/enforce-module-boundaries': [
        'error',
        {
          depConstraints: Object.entries(floors).map(([floor, below]) => ({
            sourceTag: `floor:${floor}`,
            onlyDependOnLibsWithTags: below.map((tag) => `floor:${tag}`),
          })),
        },
      ],
    },
  },
  {
    files: ['packages/*/src/**/*.ts'],
    rules: { 'no-restricted-syntax': ['error', usingInLoop] },
  },
  {
    files: ['packages/*/src/**/*.ts'],
    ignores: ['**/*.test.ts'],
    rules: {
      // Under `exactOptionalPropertyTypes` an option that lacks it cannot be handed on by who was not given one.
      'no-restricted-syntax': [
        'error',
        {
          selector:
            ':matches(TSInterfaceBody, TSTypeAliasDeclaration TSTypeLiteral) > ' +
            'TSPropertySignature[optional=true] > TSTypeAnnotation > ' +
            ':not(TSUnionType:has(> TSUndefinedKeyword), TSUndefinedKeyword, TSUnknownKeyword)',
          message: "An optional property takes undefined too: 'name?: Type | undefined'.",
        },
        usingInLoop,
      ],
    },
  },
  {
    files: ['**/*.mjs', '**/*.config.ts', '*.shared.ts', '*.setup.ts', '*.global.ts'],
    extends: [tseslint.configs.disableTypeChecked],
    languageOptions: {
      globals: { console: 'readonly', process: 'readonly', URL: 'readonly', performance: 'readonly' },
    },
  },
);
