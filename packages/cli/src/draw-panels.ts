import type { PointKind } from '@kv/serve-scheduler';

/** A small chart: rows along its axis, a series for each column. */
export interface Panel {
  readonly title: string;
  readonly rows: readonly PanelRow[];
  readonly series: readonly Series[];
  /** What the rows differ by. */
  readonly below: string;
  /** Whether the axis of the values is logarithmic. */
  readonly isLog?: boolean | undefined;
  /** Whether rows are of no order, so that nothing joins them. */
  readonly isNamed?: boolean | undefined;
}

export interface PanelRow {
  readonly label: string;
  /** Of each series; NaN where there is none. */
  readonly values: readonly number[];
}

export interface Series {
  readonly name: string;
  readonly kind: PointKind;
}

const [width, height, across, gap, legend, top] = [230, 190, 4, 50, 95, 60];
const colours = ['#2f7d5b', '#4477aa', '#aa7744', '#ab4a8f', '#777777', '#c2a83e', '#3e9cc2', '#222222'];
/** What does not fit beside another name in a line. */
const longName = 22;
/** How points of a kind look. */
const marks: Record<PointKind, string> = { simulated: '○', measured: '●', 'small-model': '◆', published: '■' };

/** Charts that have any points, as one SVG picture. Each point is marked as what it is, which the second line says. */
export function drawPanels(heading: string, given: readonly Panel[]): string {
  const panels = given.filter(({ rows }) => rows.some(({ values }) => values.some(Number.isFinite)));
  const lines = Math.ceil(panels.length / across);
  const [wide, high] = [gap + Math.min(across, Math.max(2, panels.length)) * (width + gap), top + lines * (height + legend)];
  const kinds = [...new Set(panels.flatMap(({ series }) => series.map(({ kind }) => kind)))];
  const charts = panels.flatMap((panel, index) => {
    const place = { left: gap + (index % across) * (width + gap), above: top + Math.floor(index / across) * (height + legend) };
    return chart(panel, place);
  });
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${wide} ${high}" font-family="sans-serif" font-size="10" fill="#222">`,
    `<rect width="${wide}" height="${high}" fill="#fff"/>`,
    text(gap, 18, heading, 'start', 13),
    text(gap, 33, kinds.map((kind) => `${marks[kind]} ${kind}`).join('   '), 'start', 11),
    ...charts,
    '</svg>',
    '',
  ].join('\n');
}

function chart({ title, rows, series, below, isLog = false, isNamed = false }: Panel, { left, above }: { readonly left: number; readonly above: number }): string[] {
  const scale = (value: number): number => (isLog ? Math.log10(value) : value);
  const ticks = ticksOf(rows.flatMap(({ values }) => values).filter((value) => Number.isFinite(scale(value))), isLog);
  const [low, high] = [scale(ticks[0] ?? 0), scale(ticks.at(-1) ?? 1)];
  const bottom = above + height;
  const y = (value: number): number => bottom - ((scale(value) - low) / (high - low)) * height;
  const x = (row: number): number => left + ((row + 0.5) / rows.length) * width;
  const middle = left + width / 2;
  const drawn = [text(middle, above - 8, title, 'middle', 12), text(middle, bottom + 30, below)];
  for (const tick of ticks) {
    drawn.push(`<line x1="${at(left)}" y1="${at(y(tick))}" x2="${at(left + width)}" y2="${at(y(tick))}" stroke="#ddd"/>`);
    drawn.push(text(left - 5, y(tick) + 4, short(tick), 'end'));
  }
  rows.forEach(({ label }, row) => drawn.push(text(x(row), bottom + 15, label)));
  series.forEach(({ name, kind }, index) => {
    const colour = colours[index % colours.length] ?? '';
    const points = rows.map(({ values }, row) => [x(row), y(values[index] ?? NaN)] as const).filter(([, up]) => Number.isFinite(up));
    if (!isNamed) drawn.push(`<polyline points="${points.map((point) => point.map(at).join(',')).join(' ')}" fill="none" stroke="${colour}" stroke-width="2"/>`);
    for (const [across, up] of points) {
      if (isNamed) drawn.push(`<line x1="${at(across)}" y1="${at(bottom)}" x2="${at(across)}" y2="${at(up)}" stroke="${colour}" stroke-width="2"/>`);
      drawn.push(mark(kind, across, up, colour));
    }
    const beside = series.every((each) => each.name.length < longName) ? 2 : 1;
    const [right, down] = [(index % beside) * (width / 2), 12 * Math.floor(index / beside)];
    if (series.length > 1) drawn.push(text(left + right, bottom + 46 + down, `${marks[kind]} ${name}`, 'start', 10, colour));
  });
  return drawn;
}

function mark(kind: PointKind, x: number, y: number, colour: string): string {
  if (kind === 'simulated') return `<circle cx="${at(x)}" cy="${at(y)}" r="4" fill="#fff" stroke="${colour}" stroke-width="2"/>`;
  if (kind === 'measured') return `<circle cx="${at(x)}" cy="${at(y)}" r="4" fill="${colour}"/>`;
  const corners = kind === 'published' ? [[-4, -4], [4, -4], [4, 4], [-4, 4]] : [[0, -5], [5, 0], [0, 5], [-5, 0]];
  const points = corners.map(([right = 0, down = 0]) => `${at(x + right)},${at(y + down)}`);
  return `<polygon points="${points.join(' ')}" fill="${colour}"/>`;
}

/** Powers of ten about the values, or quarters of the largest. */
function ticksOf(values: readonly number[], isLog: boolean): number[] {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  if (!isLog) return [0, 1, 2, 3, 4].map((quarter) => (quarter * (most || 1)) / 4);
  if (values.length === 0) return [1, 10];
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
