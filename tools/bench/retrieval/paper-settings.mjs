// What Tables 3 and 4 of HCAttention compare: shares of attention whose values are read, and codebooks of other sizes. All
// behind dense prompts, as the paper's.
import { kvPolicy } from '../../../packages/sparse-core/dist/index.js';
import { codes } from './coded-setting.mjs';
import { books, placedBooks } from './paper-codebooks.mjs';

const nameOf = ({ groups, centroids, separate }) => `${groups} groups of ${centroids} centroids${separate ? ' each' : ''}`;

export const settings = [
  { name: 'dense', policy: () => kvPolicy() },
  ...[0.3, 0.5, 0.7, 0.9].map((tau) => codes(`32 groups, τ = ${tau}`, placedBooks({ groups: 32, centroids: 8192 }), { tau })),
  ...books.map((book) => codes(`${nameOf(book)}, τ = 1`, placedBooks(book), { tau: 1 })),
];
