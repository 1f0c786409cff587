// The table of a whole model with a sparse cache, as Table V of the HieraSparse paper, from the rows of model-bench.mjs.
const FILE = 'hierasparse-model-h200';
const caches = { dense: 'dense', 'hierasparse-v1': 'S_V = 1', 'hierasparse-k1-v1': 'S_K = 1, S_V = 1' };
const marks = /(<!-- whole-model:begin -->\n)[^]*(<!-- whole-model:end -->)/;

const ratio = ({ result, reference }) => (reference ? `${(reference.median / result.median).toFixed(2)}×` : '');
const gigabytes = ({ result }) => `${result.median.toFixed(2)} GiB`;

function line({ promptTokens, policy }, rows) {
  const named = (measure) => rows.find((row) => row.measure.startsWith(`${measure}, `));
  const [first, later] = [named('first token'), named('each later token')];
  const memory = [named('key/value cache'), named('device memory with weights')];
  const cells = [
    policy === 'dense' ? promptTokens.toLocaleString('en-US') : '',
    caches[policy] ?? policy,
    ...[`${(first.result.median / 1000).toFixed(2)} s`, ratio(first)],
    ...[`${later.result.median.toFixed(2)} ms`, ratio(later)],
    ...memory.flatMap((row) => [gigabytes(row), ratio(row)]),
  ];
  return `| ${cells.join(' | ')} |`;
}

function table(rows) {
  const cases = new Map(rows.map(({ shapes }) => [`${shapes.promptTokens} ${shapes.policy}`, shapes]));
  const rowsOf = ({ promptTokens, policy }) =>
    rows.filter(({ shapes }) => shapes.promptTokens === promptTokens && shapes.policy === policy);
  return [
    '| prompt | cache | first token | | each later token | | keys and values | | device memory | |',
    '|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|',
    ...[...cases.values()].map((shapes) => line(shapes, rowsOf(shapes))),
  ].join('\n');
}

/** The page of HieraSparse with the table between its marks made anew; `files` are those of docs/benchmarks. */
export function withWholeModel(page, files) {
  const rows = files.find(({ name }) => name === FILE)?.rows ?? [];
  return page.replace(marks, (_all, begin, end) => `${begin}${table(rows)}\n${end}`);
}
