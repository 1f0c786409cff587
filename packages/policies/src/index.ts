export { openPolicy, openReading, type OpenPolicy, type OpenReading, type PolicyCache, type PolicyModel } from './open-policy.js';
export { type CodedReading, createPolicy, type NamedPolicy, type PlainReading, policies, type Reading } from './policies.js';
