// Pictures of docs/methods/hcattn-quality.md, as SVG strings, from rows of docs/benchmarks.
import { fileURLToPath } from 'node:url';
import { colours, dot, line, path, picture, rect, text } from './svg.mjs';

const fileOf = (name) => fileURLToPath(new URL(`../../docs/pictures/${name}.svg`, import.meta.url));
const rowsOf = (files, name) => files.find((file) => file.name === name).rows;

/** Fig. 3: the share of the tokens that hold 0.9 of the attention, layer by layer. */
function shareByLayer(files) {
  const start = 'tokens with 0.9 of the attention, ';
  const rows = rowsOf(files, 'hcattn-quality').filter(({ measure }) => measure.startsWith(start));
  const plot = { left: 56, right: 470, top: 40, bottom: 270 };
  const layers = rows[0].byLayer.length;
  const [least, most] = [0.01, 10];
  const xOf = (layer) => plot.left + ((plot.right - plot.left) * layer) / (layers - 1);
  const yOf = (percent) => plot.bottom + ((plot.top - plot.bottom) * Math.log(percent / least)) / Math.log(most / least);
  const grid = [0.01, 0.1, 1, 10].flatMap((percent) => [
    line(plot.left, yOf(percent), plot.right, yOf(percent)),
    text(plot.left - 6, yOf(percent) + 4, `${percent} %`, 'end'),
  ]);
  const drawn = rows.flatMap(({ measure, byLayer }, index) => {
    const y = plot.top + 14 + 22 * index;
    return [
      path(byLayer.map((percent, layer) => [xOf(layer), yOf(percent)]), colours[index]),
      line(plot.right + 20, y, plot.right + 44, y, colours[index]),
      text(plot.right + 50, y + 4, measure.slice(start.length), 'start'),
    ];
  });
  const ticks = Array.from({ length: layers }, (_, layer) => text(xOf(layer), plot.bottom + 18, layer));
  const names = [text(plot.left, 22, 'share of the tokens that hold 0.9 of the attention', 'start'), text((plot.left + plot.right) / 2, plot.bottom + 38, 'layer')];
  return picture(640, 322, [...grid, ...ticks, ...drawn, ...names]);
}

/** Fig. 4: attention over keys as they are, and over codes, in four layers. */
function attentionOverCodes(files) {
  const rows = rowsOf(files, 'hcattn-quality').filter(({ shown }) => shown !== undefined);
  const chosen = [0, 1, 5, 7].map((layer) => rows.find(({ measure }) => measure.endsWith(`layer ${layer}`)));
  const plot = { width: 250, height: 110, left: 50, top: 66 };
  const [least, most] = [1e-9, 1];
  const marks = chosen.flatMap(({ measure, shown, shownCoded }, index) => {
    const [x, y] = [plot.left + (index % 2) * (plot.width + 50), plot.top + Math.floor(index / 2) * (plot.height + 56)];
    const yOf = (share) => y + plot.height - (plot.height * Math.log(Math.max(share, least) / least)) / Math.log(most / least);
    const curve = (shares, colour, width) => path(shares.map((share, token) => [x + (plot.width * token) / (shares.length - 1), yOf(share)]), colour, width);
    return [
      text(x, y - 10, measure.slice(measure.lastIndexOf('layer')), 'start', ' font-weight="bold"'),
      ...Object.entries({ '10⁻⁹': 1e-9, '10⁻⁶': 1e-6, '10⁻³': 1e-3, 1: 1 }).flatMap(([name, share]) => [
        line(x, yOf(share), x + plot.width, yOf(share)),
        text(x - 5, yOf(share) + 4, name, 'end'),
      ]),
      curve(shown, colours[1], 3),
      curve(shownCoded, colours[4], 0.8),
      text(x + plot.width / 2, y + plot.height + 16, `the first ${shown.length} tokens`),
    ];
  });
  const legend = [
    line(50, 20, 74, 20, colours[1]),
    text(80, 24, 'attention over keys', 'start'),
    line(230, 20, 254, 20, colours[4]),
    text(260, 24, 'attention over codes of 16 groups, 8,192 centroids', 'start'),
  ];
  return picture(640, 400, [...legend, ...marks]);
}

/** Right answers against the bytes that stay on the device, of the settings that have a name of their own. */
function answersAgainstBytes(files) {
  const start = 'right answers, ';
  const rows = rowsOf(files, 'hcattn-quality').filter(({ measure }) => measure.startsWith(start) && !measure.slice(start.length).includes(', '));
  const dense = rows.find(({ measure }) => measure === `${start}dense`);
  const plot = { left: 64, right: 560, top: 40, bottom: 280 };
  const [fewest, most] = [5, 100];
  const [least, all] = [80, 101];
  const xOf = (percent) => plot.left + ((plot.right - plot.left) * Math.log(percent / fewest)) / Math.log(most / fewest);
  const yOf = (right) => plot.bottom + ((plot.top - plot.bottom) * (right - least)) / (all - least);
  const grid = [
    ...[100, 50, 25, 12.5, 6.25].flatMap((percent) => [line(xOf(percent), plot.top, xOf(percent), plot.bottom), text(xOf(percent), plot.bottom + 18, `${percent} %`)]),
    ...[80, 90, 100].flatMap((right) => [line(plot.left, yOf(right), plot.right, yOf(right)), text(plot.left - 6, yOf(right) + 4, `${right} %`, 'end')]),
  ];
  const points = rows
    .toSorted((one, other) => other.result.median - one.result.median || one.kvBytes - other.kvBytes)
    .map(({ measure, result, kvBytes }) => ({ name: measure.slice(start.length), x: xOf((100 * kvBytes) / dense.kvBytes), y: yOf(result.median) }));
  const marks = points.flatMap(({ name, x, y }, index) => {
    // Of neighbours, every other name stands below its dot.
    const near = points.slice(0, index).filter((other) => Math.abs(other.x - x) < 90 && Math.abs(other.y - y) < 30);
    return [dot(x, y, /hcattn/.test(name) ? colours[0] : colours[1]), text(x, y + (near.length % 2 === 1 ? 18 : -9), name)];
  });
  const names = [
    text(plot.left - 50, 20, 'right answers to the seven tasks; green: values on the host', 'start'),
    text((plot.left + plot.right) / 2, plot.bottom + 38, 'bytes on the device, of the dense cache, 8,192 tokens'),
  ];
  return picture(640, 330, [...grid, ...marks, ...names]);
}

/** When device and host work in a step of one layer over a million tokens, of which 5 % are read. */
function stepInTime(files) {
  const rows = rowsOf(files, 'hcattn-h200');
  const found = (measure) => rows.find((row) => row.measure === measure).result.median;
  const parts = [
    { lane: 0, name: 'scores', time: found('scores of 1048576 tokens in codes, 64 groups') },
    { lane: 0, name: 'choice', time: found('choice of tokens, 1048576 scores a head, lists in host memory') },
    { lane: 1, name: 'sum of values', time: found('sum of values on the host, 5% of 1048576 rows, float16') },
  ];
  const plot = { left: 70, right: 610, top: 44, lane: 40 };
  const whole = parts.reduce((sum, { time }) => sum + time, 0);
  const xOf = (time) => plot.left + ((plot.right - plot.left) * time) / whole;
  let begun = 0;
  const bars = parts.flatMap(({ lane, name, time }) => {
    const [from, to, y] = [xOf(begun), xOf(begun + time), plot.top + lane * plot.lane];
    begun += time;
    return [rect(from, y, to - from - 1, 28, colours[lane]), text((from + to) / 2, y + 18, `${name} ${time.toFixed(2)}`, 'middle', ' fill="#fff"')];
  });
  const lanes = ['device', 'host'].map((name, lane) => text(plot.left - 8, plot.top + lane * plot.lane + 18, name, 'end'));
  const names = text(plot.left, 24, `a layer over 1,048,576 tokens in ${whole.toFixed(2)} ms, of which 5 % are read (ms)`, 'start');
  return picture(640, 136, [names, ...lanes, ...bars]);
}

/** Path → text. `files` are those of docs/benchmarks. */
export const hcattnCharts = (files) =>
  Object.entries({
    'attention-by-layer': shareByLayer,
    'attention-over-codes': attentionOverCodes,
    'answers-against-bytes': answersAgainstBytes,
    'step-in-time': stepInTime,
  }).map(([name, draw]) => [fileOf(name), draw(files)]);
