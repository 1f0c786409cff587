import { CapabilityError } from '../errors.js';

/** A part of a policy that may do more than its contract says, for others that know this by name. */
export interface Capable {
  readonly name: string;
  /** What this part has of that name; undefined if nothing. Who wraps a part passes on what that one has. */
  capability?(name: string): object | undefined;
}

/**
 * Something that one part of a policy does for another. It is asked for by its name, never by the class of a part, so that
 * a part that wraps another can pass it on.
 */
export class Capability<Kind extends object> {
  readonly name: string;
  readonly #source: string;

  /**
   * @param name unlike any other, such as `hierasparse: prompts in sparse blocks`
   * @param source a part that has it, such as `hieraSparseStore()`
   */
  constructor(name: string, source: string) {
    this.name = name;
    this.#source = source;
  }

  /** What a part has of it, or undefined. */
  of(part: Capable): Kind | undefined {
    return part.capability?.(this.name) as Kind | undefined;
  }

  /**
   * What a part has of it.
   * @param asker the name of the part that needs it
   * @throws CapabilityError when the part has nothing of that name
   */
  expect(part: Capable, asker: string): Kind {
    const found = this.of(part);
    if (found !== undefined) return found;
    throw new CapabilityError(
      `'${asker}' needs the capability '${this.name}', which '${part.name}' lacks. Give kvPolicy() what has it, such as ` +
        `${this.#source}; a part that wraps another passes on its capability().`,
      { subject: this.name, given: part.name, wanted: this.name },
    );
  }
}
