// What the charts share: marks of an SVG picture as strings.

const at = (number) => number.toFixed(1);

export const text = (x, y, words, anchor = 'middle', more = '') => `<text x="${at(x)}" y="${at(y)}" text-anchor="${anchor}"${more}>${words}</text>`;
export const line = (x1, y1, x2, y2, colour = '#ddd') => `<line x1="${at(x1)}" y1="${at(y1)}" x2="${at(x2)}" y2="${at(y2)}" stroke="${colour}"/>`;
export const rect = (x, y, width, height, colour) => `<rect x="${at(x)}" y="${at(y)}" width="${at(width)}" height="${at(height)}" fill="${colour}"/>`;
export const dot = (x, y, colour) => `<circle cx="${at(x)}" cy="${at(y)}" r="4" fill="${colour}"/>`;
export const path = (points, colour, width = 2) =>
  `<polyline points="${points.map((point) => point.map(at).join(',')).join(' ')}" fill="none" stroke="${colour}" stroke-width="${width}"/>`;

export const colours = ['#2f7d5b', '#4477aa', '#aa7744', '#ab4a8f', '#b3262e', '#777777', '#8a8a2a'];

export const picture = (width, height, marks) =>
  [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" font-family="sans-serif" font-size="12" fill="#222">`,
    rect(0, 0, width, height, '#fff'),
    ...marks,
    '</svg>',
    '',
  ].join('\n');
