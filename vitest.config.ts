import { defineConfig } from 'vitest/config';
import { packageTests } from './vitest.shared.ts';

/** All packages in one run, which `npm test` is. */
export default defineConfig(packageTests('packages/*/src'));
