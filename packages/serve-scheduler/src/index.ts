export { createEngine } from './engine/engine.js';
export type { Engine } from './engine/engine.js';
export type { EngineOptions, EngineRequestOptions } from './engine/engine-options.js';
export type { AnswerStep, Batch, PromptPart } from './scheduler/batch.js';
export type { RequestSize, RequestState, ScheduledRequest } from './scheduler/request.js';
export { Scheduler } from './scheduler/scheduler.js';
export type { Features, ModelShape, SchedulerOptions } from './scheduler/scheduler-options.js';
