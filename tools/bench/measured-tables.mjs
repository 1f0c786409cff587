// Tables of chosen rows of docs/benchmarks, between the marks `<!-- measured:begin -->` and `<!-- measured:end -->` of a page.

const figure = (value) => Number(value.toPrecision(3)).toLocaleString('en-US');

/** How many times better than the reference, whichever way better is. */
export const ratioOf = ({ better, result, reference }) => (better === 'higher' ? result.median / reference.median : reference.median / result.median);

export function rowOf(files, name, measure) {
  const row = files.find((file) => file.name === name)?.rows.find((each) => each.measure === measure);
  if (row === undefined) throw new Error(`A page shows '${measure}' of ${name}.json, which has no such row`);
  return row;
}

function tableLine(row, says) {
  const { result, reference, unit } = row;
  const theirs = `${figure(reference.median)} ${unit}, ${reference.name}`;
  return `| ${says} | ${figure(result.median)} ${unit} | ${theirs} | ${ratioOf(row).toFixed(2)}× |`;
}

/** `rows` are each a file of docs/benchmarks, a measure in it, and what it says to a stranger. */
export function measuredTable(files, rows) {
  const lines = rows.map(([name, measure, says]) => tableLine(rowOf(files, name, measure), says));
  return ['| measured | here | reference | ratio |', '|---|---|---|---|', ...lines, ''].join('\n');
}

/** The page with what is between its marks made anew. */
export function withMeasured(page, text) {
  const marks = /(<!-- measured:begin -->\n)[^]*(<!-- measured:end -->)/;
  if (!marks.test(page)) throw new Error('A page that shows rows has no marks for them');
  return page.replace(marks, (_all, begin, end) => `${begin}\n${text}\n${end}`);
}
