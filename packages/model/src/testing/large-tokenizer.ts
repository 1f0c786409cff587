const letters = Array.from('etaoinshrdlucmfwypvbgkjqxz');
const split =
  "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" +
  '\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+';

/** The 256 characters that stand for bytes in a byte-level vocabulary: those that print, then others from U+0100 on. */
function byteCharacters(): string[] {
  const prints = (byte: number): boolean =>
    (byte > 32 && byte < 127) || (byte > 160 && byte < 173) || (byte > 173 && byte < 256);
  let others = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(prints(byte) ? byte : others++));
}

/** A tokenizer.json like that of Llama 3: a byte-level BPE whose merges spell the strings of letters, shortest first. */
export function largeTokenizer(tokens: number): object {
  const vocab = Object.fromEntries(byteCharacters().map((character, byte) => [character, byte]));
  const merges: [string, string][] = [];
  let next = 256;
  for (let level: readonly string[] = letters; next < tokens; ) {
    const pairs = level.flatMap((word) => letters.map((letter): [string, string] => [word, letter]));
    const kept = pairs.slice(0, tokens - next);
    for (const [word, letter] of kept) vocab[word + letter] = next++;
    merges.push(...kept);
    level = kept.map(([word, letter]) => word + letter);
  }
  const special = { single_word: false, lstrip: false, rstrip: false, normalized: false, special: true };
  return {
    added_tokens: [{ id: tokens, content: '<|bos|>', ...special }],
    normalizer: null,
    pre_tokenizer: {
      type: 'Sequence',
      pretokenizers: [
        { type: 'Split', pattern: { Regex: split }, behavior: 'Isolated', invert: false },
        { type: 'ByteLevel', add_prefix_space: false, trim_offsets: true, use_regex: false },
      ],
    },
    post_processor: null,
    decoder: { type: 'ByteLevel' },
    model: { type: 'BPE', unk_token: null, vocab, merges },
  };
}
