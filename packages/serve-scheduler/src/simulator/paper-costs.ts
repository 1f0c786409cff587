import { Costs } from './costs.js';
import h200 from './h200-costs.json' with { type: 'json' };

/** Bytes and operations of the two GPUs: device memory as the paper gives it, f16 products as the data sheets do. */
const terabytesPerSecond = { h200: 4.8, a100: 1.6 };
const teraflops = { h200: 989, a100: 312 };
/** From so many rows on, linear layers are limited by arithmetic and no longer by their weights. */
const arithmeticRows = 1024;

const table = h200.tables;
type Table = (typeof table)['rows'];

function scaled({ unit, points }: Table, isArithmetic: (at: number) => boolean): Table {
  const [memory, arithmetic] = [terabytesPerSecond.h200 / terabytesPerSecond.a100, teraflops.h200 / teraflops.a100];
  return {
    unit,
    points: points.map(({ at, milliseconds, from }) => {
      const [times, by] = isArithmetic(at) ? [arithmetic, 'f16 products'] : [memory, 'device memory'];
      return { at, milliseconds: milliseconds * times, from: `computed: ${times.toFixed(2)} times that of an H200, by ${by}; ${from}` };
    }),
  };
}

/**
 * The machine of the paper's evaluation, an A100 of 40 GB on PCIe 4, as far as it is published: kernels take what they take on
 * an H200, times what limits them, and the link is as the paper measured it. Nothing here was measured by us.
 */
export function paperCosts(): Costs {
  const published = (rate: number, from: string) => ({ rate, from: `published: ${from}` });
  return new Costs({
    gpu: 'NVIDIA A100 40 GB, computed',
    driver: 'none',
    clockMegahertz: 1410,
    model: h200.model,
    tables: {
      rows: scaled(table.rows, (at) => at >= arithmeticRows),
      decodeAttention: scaled(table.decodeAttention, () => false),
      prefillAttention: scaled(table.prefillAttention, () => true),
      selection: scaled(table.selection, () => false),
      keeping: scaled(table.keeping, () => false),
      placing: scaled(table.placing, () => false),
    },
    besideSaves: { share: 0, from: 'published: Fig. 14b, FlashD2H takes as long as computing alone' },
    gigabytesPerSecond: {
      gather: published(20, 'FlashH2D, at least so much'),
      copies: published(4, 'blocks of 16 KiB, a memcpy each, at most so much'),
      save: published(23, 'FlashD2H, at least so much'),
      saveCopies: published(6, 'a memcpy a block, at most so much'),
    },
  });
}
