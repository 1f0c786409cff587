/**
 * The program of the tokenizer's process: whatever a file of the model decides runs here. It is text, not a file, so
 * that it starts the same way from the ESM build, the CommonJS build, the sources and a user's bundle.
 */
export const tokenizerProgram = `
const { readFileSync } = require('node:fs');
const { Script } = require('node:vm');
let tokenizer, template;

const operations = {
  open({ definitionFile, settings, template: source, tokenizers, jinja }) {
    const { Tokenizer } = require(tokenizers);
    tokenizer = new Tokenizer(JSON.parse(readFileSync(definitionFile, 'utf8')), JSON.parse(settings));
    if (source !== null) {
      const { Template } = require(jinja);
      try { template = new Template(source); } catch (error) { throw Object.assign(error, { of: 'template' }); }
    }
    return spellVocabulary();
  },
  encode({ text, addSpecialTokens }) {
    const { ids, tokens } = tokenizer.encode(text, { add_special_tokens: addSpecialTokens });
    const missing = ids.findIndex((id) => !isId(id));
    if (missing !== -1) throw new Error('its token ' + JSON.stringify(tokens[missing]) + ' has no id');
    return Int32Array.from(ids);
  },
  tokenId: ({ token }) => tokenizer.model.tokens_to_ids.get(token),
  render: ({ values }) => template.render(values),
};

const mostIds = 2 ** 24;
const isId = (id) => Number.isInteger(id) && id >= 0 && id < mostIds;

// What each token adds to a text, as bytes: one after the other they spell it.
function spellVocabulary() {
  const { vocab, tokens_to_ids: ids } = tokenizer.model;
  for (const [token, id] of ids) {
    if (!isId(id)) throw new Error('token ' + JSON.stringify(token) + ' has the id ' + JSON.stringify(id));
  }
  const special = new Set(tokenizer.special_tokens);
  const { spell, leadingSpaces } = speller();
  const kinds = new Uint8Array(vocab.length);
  const ends = new Uint32Array(vocab.length);
  let bytes = Buffer.alloc(8 * vocab.length);
  let end = 0;
  for (let id = 0; id < vocab.length; id += 1) {
    const token = vocab[id];
    if (token !== undefined) {
      const text = spell(token);
      if (end + 3 * text.length > bytes.length) bytes = Buffer.concat([bytes], 2 * bytes.length + 3 * text.length);
      for (const character of text) {
        const code = character.codePointAt(0);
        if (code >= byteZero && code < byteZero + 256) bytes[end++] = code - byteZero;
        else end += bytes.write(character, end);
      }
      kinds[id] = special.has(token) ? 2 : 1;
    }
    ends[id] = end;
  }
  return { bytes: new Uint8Array(bytes.subarray(0, end)), ends, kinds, leadingSpaces };
}

// A byte of a character that is spread over several tokens stands in a text as a lone surrogate until all are joined.
const byteZero = 0xdc00;
const text_decoder = { decode: (bytes) => Array.from(bytes, (byte) => String.fromCharCode(byteZero + byte)).join('') };

// Spells a token as the decoder does behind other tokens, and says how many spaces a text loses at its start.
function speller() {
  const { decoder } = tokenizer;
  if (decoder === null) return { spell: (token) => ' ' + token, leadingSpaces: 1 };
  const flat = (stage) => (stage.config.type === 'Sequence' ? stage.decoders.flatMap(flat) : [stage]);
  const stages = [];
  let isFused = false;
  let leadingSpaces = 0;
  for (const stage of flat(decoder)) {
    const { type, pattern, content = '', stop = 0 } = stage.config;
    if (type === 'Fuse') isFused = true;
    else if (type === 'ByteLevel' || type === 'ByteFallback') stages.push(Object.assign(stage, { text_decoder }));
    else if (type === 'Strip' && isFused && content === ' ' && stop === 0) leadingSpaces += stage.start;
    else if (spellsAlone(stage.config, isFused)) stages.push(stage);
    else throw Object.assign(new Error('its decoder ' + type), { of: 'decoder' });
    if (type === 'Metaspace') leadingSpaces += 1;
  }
  if (decoder.end_of_word_suffix) throw Object.assign(new Error('a suffix at the end of words'), { of: 'decoder' });
  // A decoder of bytes at the top leaves added tokens as they are.
  const verbatim = new Set(decoder.config.type === 'ByteLevel' ? tokenizer.added_tokens.map(({ content }) => content) : []);
  decoder.added_tokens = [];
  const spell = (token) =>
    verbatim.has(token) ? token : stages.reduce((tokens, stage) => stage.decode_chain(tokens), ['', token]).join('');
  return { spell, leadingSpaces };
}

// Whether a stage of a decoder does to each token, or to all of them joined, what it does to one.
function spellsAlone({ type, pattern }, isFused) {
  if (isFused) return type === 'Replace' && pattern.String?.length === 1;
  return type === 'Replace' || type === 'Metaspace' || type === 'Strip';
}

// A regular expression that does not end keeps the end of the parent from being heard of. A script with a time limit is
// ended by another thread.
const watched = new Script('work()');

process.on('message', ({ operation, argument, milliseconds }) => {
  globalThis.work = () => operations[operation](argument);
  let answer;
  try {
    answer = { value: watched.runInThisContext({ timeout: milliseconds }) };
  } catch (error) {
    answer = { error: { reason: String(error?.message ?? error).slice(0, 200), of: error?.of ?? 'tokenizer' } };
  }
  process.send(answer);
});
process.on('disconnect', () => process.exit());
`;
