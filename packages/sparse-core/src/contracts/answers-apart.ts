import { Capability } from './capability.js';

/**
 * Of a store: with `KvCapacity.answersApart` the bits of an answer follow from its own rows alone, in a step of as many rows
 * as any other.
 */
export const answersApart = new Capability('answers whose bits do not depend on others', 'densePagedStore()');
