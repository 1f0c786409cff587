import fc from 'fast-check';
import { describe, expect, it } from 'vitest';

import { StopMatcher } from './stop-matcher.js';

function stream(parts: readonly string[], stops: readonly string[]): { text: string; stopped: boolean } {
  const matcher = new StopMatcher(stops);
  const passed = parts.map((part) => matcher.push(part));
  return { text: passed.join('') + matcher.end(), stopped: matcher.stopped };
}

describe('StopMatcher', () => {
  it('passes text on at once when nothing in it can begin a stop string', () => {
    const matcher = new StopMatcher(['###', 'END']);
    expect(matcher.push('hello ')).toBe('hello ');
    expect(matcher.push('wor#')).toBe('wor');
    expect(matcher.push('#x')).toBe('##x');
    expect(matcher.stopped).toBe(false);
  });

  it('cuts before the earliest stop string, wherever the tokens are cut', () => {
    expect(stream(['ab', 'cE', 'N', 'Dxyz'], ['###', 'END'])).toEqual({ text: 'abc', stopped: true });
    expect(stream(['a##', '#END'], ['END', '###'])).toEqual({ text: 'a', stopped: true });
    expect(stream(['aab'], ['ab', 'aab'])).toEqual({ text: '', stopped: true });
  });

  it('gives what it held when the text ends', () => {
    expect(stream(['ab#', '#'], ['###'])).toEqual({ text: 'ab##', stopped: false });
    expect(stream(['text'], [])).toEqual({ text: 'text', stopped: false });
  });

  it('does the same as a search of the whole text, up to the part where the stop string appeared', () => {
    const letters = fc.string({ unit: fc.constantFrom('a', 'b'), maxLength: 4 });
    const stops = fc.array(fc.string({ unit: fc.constantFrom('a', 'b'), minLength: 1, maxLength: 3 }), {
      maxLength: 3,
    });
    fc.assert(
      fc.property(fc.array(letters, { maxLength: 6 }), stops, (parts, stopStrings) => {
        // Of a text that is still coming, the first stop string to be complete counts.
        let seen = '';
        for (const part of parts) {
          seen += part;
          if (stopStrings.some((stop) => seen.includes(stop))) break;
        }
        const at = stopStrings.map((stop) => seen.indexOf(stop)).filter((index) => index >= 0);
        const text = at.length > 0 ? seen.slice(0, Math.min(...at)) : seen;
        expect(stream(parts, stopStrings)).toEqual({ text, stopped: at.length > 0 });
      }),
      { numRuns: 2000, seed: 20_260_104 },
    );
  });
});
