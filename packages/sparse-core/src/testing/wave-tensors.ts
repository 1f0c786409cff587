import type { Device } from '../handles.js';
import type { Axes, Extents } from '../layout.js';

/** An f32 tensor of numbers from −1 to 1: sin of their place. */
export function waves<const A extends Axes>(device: Device, axes: A, shape: Extents<A>) {
  const length = Object.values(shape).reduce((product, extent) => product * extent, 1);
  return device.tensor('f32', axes, shape, Float32Array.from({ length }, (_, index) => Math.sin(index)));
}

/** A paged cache of them, whose slots have their blocks in order, and as many tokens each. */
export function pagedWaves(
  device: Device,
  sizes: { readonly slots: number; readonly kvHeads: number; readonly width: number; readonly blockTokens: number; readonly dim: number; readonly tokens: number },
) {
  const { slots, kvHeads, width, blockTokens, dim, tokens } = sizes;
  const blocks = slots * kvHeads * width;
  const pool = () => waves(device, ['block', 'blockToken', 'dim'], [blocks, blockTokens, dim]);
  const order = Int32Array.from({ length: blocks }, (_, block) => block);
  return {
    keys: pool(),
    values: pool(),
    blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [slots, kvHeads, width], order),
    keyCounts: device.tensor('i32', ['slot', 'kvHead'], [slots, kvHeads], new Int32Array(slots * kvHeads).fill(tokens)),
  };
}
