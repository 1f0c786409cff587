import { defineConfig } from 'tsup';
import { packageBuild } from '../../tsup.shared';

// Split in CommonJS too, so that both entries have the same classes.
export default defineConfig({ ...packageBuild('index', 'native'), splitting: true });
