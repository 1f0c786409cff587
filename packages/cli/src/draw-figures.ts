import type { FigureName, FigureTable } from '@kv/serve-scheduler';

interface Panel {
  readonly figure: FigureName;
  readonly title: string;
  /** Of the table. */
  readonly columns: readonly number[];
  /** Whether the axis of the values is logarithmic. */
  readonly isLog?: boolean | undefined;
  /** What the rows differ by. Default: requests a second. */
  readonly below?: string | undefined;
  /** Of the rows, where what they are called is too long. */
  readonly labels?: readonly string[] | undefined;
}

const panels: readonly Panel[] = [
  { figure: '1', title: 'tokens/s, without control', columns: [1], below: 'answers in a step' },
  { figure: '4', title: 'link, GB/s of 16 KiB blocks', columns: [1], below: '', labels: ['loads', 'FlashH2D', 'saves', 'FlashD2H'] },
  { figure: '8', title: 'overlap of blocks, %', columns: [1], below: 'steps before' },
  { figure: '10', title: 'first token, ms', columns: [1, 2, 3, 4], isLog: true },
  { figure: '11', title: 'tokens/s', columns: [1, 2, 3, 4] },
  { figure: '12', title: 'between tokens, ms', columns: [1, 2, 3, 4], isLog: true },
  { figure: '13', title: 'goodput, requests/s', columns: [1], below: '' },
  { figure: '14a', title: 'a step, ms', columns: [1, 3], below: 'answers in a step' },
  { figure: '14b', title: 'a saved prompt, times one that is not', columns: [1, 2], below: 'tokens' },
  { figure: '15', title: 'blocks loaded a step', columns: [3, 4], isLog: true },
  { figure: '16a', title: 'first token, ms', columns: [1, 2], isLog: true },
  { figure: '16b', title: 'attention of a prompt, times one piece', columns: [1, 2], below: 'tokens of a chunk' },
];

const [width, height, across, gap, legend, top] = [230, 190, 4, 50, 95, 60];
const colours = ['#2f7d5b', '#4477aa', '#aa7744', '#ab4a8f'];

/** The tables as an SVG picture of small charts. It says that its points are simulated. */
export function drawFigures(tables: readonly FigureTable[], model: string): string {
  const drawn = panels.flatMap((panel) => {
    const table = tables.find(({ figure }) => figure === panel.figure);
    return table ? [{ panel, table }] : [];
  });
  const lines = Math.ceil(drawn.length / across);
  const [wide, high] = [gap + across * (width + gap), top + lines * (height + legend)];
  const [first] = drawn;
  const heading = first ? `${model}: all points are ${first.table.kind}, by times of ${first.table.gpu}` : '';
  const marks = drawn.flatMap(({ panel, table }, index) => {
    const place = { left: gap + (index % across) * (width + gap), above: top + Math.floor(index / across) * (height + legend) };
    return chart(panel, table, place);
  });
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${wide} ${high}" font-family="sans-serif" font-size="10" fill="#222">`,
    `<rect width="${wide}" height="${high}" fill="#fff"/>`,
    text(gap, 20, heading, 'start', 13),
    ...marks,
    '</svg>',
    '',
  ].join('\n');
}

function chart(
  { title, columns, isLog = false, below = 'requests/s', labels }: Panel,
  { figure, rows, columns: names }: FigureTable,
  { left, above }: { readonly left: number; readonly above: number },
): string[] {
  const values = columns.map((column) => rows.map((row) => Number(row[column])));
  const ticks = ticksOf(values.flat(), isLog);
  const scale = (value: number): number => (isLog ? Math.log10(value) : value);
  const [low, high] = [scale(ticks[0] ?? 0), scale(ticks.at(-1) ?? 1)];
  const bottom = above + height;
  const y = (value: number): number => bottom - ((scale(value) - low) / (high - low)) * height;
  const x = (row: number): number => left + ((row + 0.5) / rows.length) * width;
  const middle = left + width / 2;
  const marks = [text(middle, above - 12, `Fig. ${figure}: ${title}`, 'middle', 12), text(middle, bottom + 30, below)];
  for (const tick of ticks) {
    marks.push(`<line x1="${at(left)}" y1="${at(y(tick))}" x2="${at(left + width)}" y2="${at(y(tick))}" stroke="#ddd"/>`);
    marks.push(text(left - 5, y(tick) + 4, short(tick), 'end'));
  }
  rows.forEach(([name], row) => marks.push(text(x(row), bottom + 15, labels?.[row] ?? String(name))));
  values.forEach((ofColumn, series) => {
    const colour = colours[series] ?? '#777777';
    const points = ofColumn.map((value, row) => [x(row), y(value)] as const);
    const isNamed = typeof rows[0]?.[0] === 'string';
    if (!isNamed) marks.push(`<polyline points="${points.map((point) => point.map(at).join(',')).join(' ')}" fill="none" stroke="${colour}" stroke-width="2"/>`);
    for (const [across, up] of points) {
      if (isNamed) marks.push(`<rect x="${at(across - 10)}" y="${at(up)}" width="20" height="${at(bottom - up)}" fill="${colour}"/>`);
      else marks.push(`<circle cx="${at(across)}" cy="${at(up)}" r="4" fill="${colour}"/>`);
    }
    const [right, down] = [(series % 2) * (width / 2), 12 * Math.floor(series / 2)];
    if (columns.length > 1) marks.push(text(left + right, bottom + 46 + down, `● ${(names[columns[series] ?? 0] ?? '').trim()}`, 'start', 10, colour));
  });
  return marks;
}

/** Powers of ten about the values, or quarters of the largest. */
function ticksOf(values: readonly number[], isLog: boolean): number[] {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  if (!isLog) return [0, 1, 2, 3, 4].map((quarter) => (quarter * most) / 4);
  const [first, last] = [Math.floor(Math.log10(least)), Math.ceil(Math.log10(most))];
  return Array.from({ length: Math.max(2, last - first + 1) }, (_, index) => 10 ** (first + index));
}

function text(x: number, y: number, words: string, anchor = 'middle', size = 10, colour = '#222'): string {
  const safe = words.replaceAll('&', '&amp;').replaceAll('<', '&lt;');
  return `<text x="${at(x)}" y="${at(y)}" text-anchor="${anchor}" font-size="${size}" fill="${colour}">${safe}</text>`;
}

const at = (number: number): string => number.toFixed(1);

function short(value: number): string {
  if (value >= 1e6) return `${value / 1e6}M`;
  return value >= 1e4 ? `${value / 1000}K` : String(Number(value.toPrecision(3)));
}
