export type { AnswerStep, Batch, PromptPart } from './scheduler/batch.js';
export type { RequestSize, RequestState, ScheduledRequest } from './scheduler/request.js';
export { Scheduler } from './scheduler/scheduler.js';
export type { Features, ModelShape, SchedulerOptions } from './scheduler/scheduler-options.js';
