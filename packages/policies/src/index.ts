export { createPolicy, policies, type NamedPolicy, type Reading } from './policies.js';
