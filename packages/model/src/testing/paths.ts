import { fileURLToPath } from 'node:url';

/** The five reference models with their logits. */
export const goldenDirectory = fileURLToPath(new URL('../../test-data/golden', import.meta.url));

/** The small trained model of this repository. */
export const needleModel = fileURLToPath(new URL('../../../../models/needle-8m', import.meta.url));
