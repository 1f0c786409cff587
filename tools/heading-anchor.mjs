/** What GitHub calls a heading in links to it. */
export function headingAnchor(title) {
  return title
    .replace(/\]\([^)]*\)/g, '')
    .toLowerCase()
    .replace(/[^\p{L}\p{N}\s_-]/gu, '')
    .replace(/ /g, '-');
}
