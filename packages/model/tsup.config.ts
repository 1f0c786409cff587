import { defineConfig } from 'tsup';
import { packageBuild } from '../../tsup.shared';

// The shims give the CommonJS build an `import.meta.url`, from which the worker thread's library is found.
export default defineConfig({ ...packageBuild, shims: true });
