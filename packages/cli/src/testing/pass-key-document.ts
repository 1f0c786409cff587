import { temporaryFile } from './run-kv.js';

export const passKeyQuestion = 'What is the pass key? The pass key is';
export const passKey = '27238';

const filler = [
  'def add(a, b):',
  '    """Return the sum of two numbers."""',
  '    return a + b',
  '',
  'class Counter:',
  '    def __init__(self):',
  '        self.total = 0',
  '',
  '    def count(self, items):',
  '        for item in items:',
  '            self.total += 1',
  '        return self.total',
  '',
].join('\n');

/** A document that holds one fact, in the wording that the model was trained on. 12 repeats before and behind it are about 1,700 tokens. */
export function passKeyDocument(repeats = 12): string {
  const half = `${filler}\n`.repeat(repeats);
  return `${half}The pass key is ${passKey}. Remember it. ${passKey} is the pass key.\n${half}`;
}

export function passKeyFile(repeats?: number): Promise<string> {
  return temporaryFile('document.txt', passKeyDocument(repeats));
}
