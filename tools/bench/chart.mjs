// Horizontal bars as an SVG string: how many times faster than the reference, with a line at 1×.

const BARS = 320;
const LABELS = 330;
const DETAILS = 210;
const LETTER = 6.2;
const ROW = 26;
const TOP = 58;
const BETTER = '#2f7d5b';
const WORSE = '#b3623b';

const escape = (text) => text.replace(/[&<>]/g, (sign) => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;' })[sign]);

/** `bars`: `[{ label, ratio, detail }]`. */
export function ratioChart(title, bars) {
  const longest = Math.max(1.2, ...bars.map(({ ratio }) => ratio));
  const labels = Math.max(LABELS, ...bars.map(({ label }) => Math.ceil(label.length * LETTER) + 20));
  const width = labels + BARS + DETAILS;
  const scale = (ratio) => (ratio / longest) * BARS;
  const height = TOP + bars.length * ROW + 12;
  const one = (labels + scale(1)).toFixed(1);
  const rows = bars.flatMap(({ label, ratio, detail }, index) => {
    const y = TOP + index * ROW;
    const end = labels + scale(ratio);
    return [
      `<text x="${labels - 8}" y="${y + 14}" text-anchor="end">${escape(label)}</text>`,
      `<rect x="${labels}" y="${y}" width="${scale(ratio).toFixed(1)}" height="18" fill="${ratio >= 1 ? BETTER : WORSE}"/>`,
      `<text x="${(end + 6).toFixed(1)}" y="${y + 14}">${ratio.toFixed(2)}× · ${escape(detail)}</text>`,
    ];
  });
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" font-family="sans-serif" font-size="12">`,
    `<rect width="${width}" height="${height}" fill="#fff"/>`,
    `<text x="12" y="22" font-size="15" font-weight="bold">${escape(title)}</text>`,
    ...rows,
    `<line x1="${one}" x2="${one}" y1="${TOP - 8}" y2="${height - 8}" stroke="#444" stroke-dasharray="3 3"/>`,
    `<text x="${one}" y="${TOP - 12}" text-anchor="middle">1×</text>`,
    '</svg>',
    '',
  ].join('\n');
}
