import type { FigureName, FigureTable } from '@kv/serve-scheduler';

import { drawPanels } from './draw-panels.js';
import type { Panel } from './draw-panels.js';

interface Drawing extends Pick<Panel, 'title' | 'isLog' | 'isNamed'> {
  readonly figure: FigureName;
  /** Of the table, those that are there. */
  readonly columns: readonly number[];
  /** What the rows differ by. Default: requests a second. */
  readonly below?: string | undefined;
  /** Of the rows, where what they are called is too long. */
  readonly labels?: readonly string[] | undefined;
}

const drawings: readonly Drawing[] = [
  { figure: '1', title: 'tokens/s, without control', columns: [1], below: 'answers in a step' },
  { figure: '4', title: 'link, GB/s of 16 KiB blocks', columns: [1], below: '', isNamed: true, labels: ['loads', 'FlashH2D', 'saves', 'FlashD2H'] },
  { figure: '8', title: 'overlap of blocks, %', columns: [1, 2], below: 'steps before' },
  { figure: '10', title: 'first token, ms', columns: [1, 2, 3, 4], isLog: true },
  { figure: '11', title: 'tokens/s', columns: [1, 2, 3, 4] },
  { figure: '12', title: 'between tokens, ms', columns: [1, 2, 3, 4], isLog: true },
  { figure: '13', title: 'goodput, requests/s', columns: [1], below: '', isNamed: true },
  { figure: '14a', title: 'a step, ms', columns: [1, 3], below: 'answers in a step' },
  { figure: '14b', title: 'a saved prompt, times one that is not', columns: [1, 2, 3], below: 'tokens' },
  { figure: '15', title: 'blocks loaded a step', columns: [3, 4], isLog: true },
  { figure: '16a', title: 'first token, ms', columns: [1, 2], isLog: true },
  { figure: '16b', title: 'attention of a prompt, times one piece', columns: [1, 2, 3], below: 'tokens of a chunk' },
];

/** The tables as an SVG picture of small charts. */
export function drawFigures(tables: readonly FigureTable[], model: string): string {
  const drawn = drawings.flatMap((drawing) => {
    const table = tables.find(({ figure }) => figure === drawing.figure);
    return table ? [{ gpu: table.gpu, panel: panelOf(drawing, table) }] : [];
  });
  return drawPanels(`${model}, by times of ${drawn[0]?.gpu ?? ''}`, drawn.map(({ panel }) => panel));
}

function panelOf({ figure, title, columns, below = 'requests/s', labels, isLog, isNamed }: Drawing, table: FigureTable): Panel {
  const shown = columns.filter((column) => column < table.columns.length);
  return {
    title: `Fig. ${figure}: ${title}`,
    series: shown.map((column) => ({ name: (table.columns[column] ?? '').trim(), kind: table.kinds[column - 1] ?? 'simulated' })),
    rows: table.rows.map((row, index) => ({ label: labels?.[index] ?? String(row[0]), values: shown.map((column) => Number(row[column])) })),
    ...{ below, isLog, isNamed },
  };
}
