import type { Request } from './request.js';

/** The requests that wait, those under way, and those of either that go first. */
export class RequestQueues {
  /** By arrival. */
  readonly waiting: Request[] = [];
  /** By arrival. */
  readonly underWay: Request[] = [];
  /** In the order in which they were promoted. */
  readonly #promoted: Request[] = [];

  /** The first answer of those that go first. */
  get firstAnswer(): Request | undefined {
    return this.#promoted.find(({ state }) => state === 'answering');
  }

  /**
   * Algorithm 1, line 5: B_init, at most R_max requests. Answers come before prompts, so that none waits for a prompt that came
   * later; who was promoted comes before all.
   */
  candidates(maxRequests: number): Request[] {
    const others = this.underWay.filter(({ promoted }) => !promoted);
    const answering = others.filter(({ state }) => state === 'answering');
    const reading = others.filter(({ state }) => state === 'reading');
    let slots = maxRequests - this.underWay.length;
    const first = this.#promoted.filter(({ state }) => state !== 'answered' && (state !== 'waiting' || slots-- > 0));
    const queue: Request[] = [];
    for (const request of this.waiting) {
      if (queue.length >= slots) break;
      if (!request.promoted) queue.push(request);
    }
    return [...first, ...answering, ...reading, ...queue];
  }

  begin(request: Request): void {
    remove(this.waiting, request);
    insert(this.underWay, request);
  }

  restart(request: Request): void {
    remove(this.underWay, request);
    insert(this.waiting, request);
  }

  /** From now on it goes first, behind those that were promoted before. */
  promote(request: Request): void {
    if (request.promoted) return;
    request.promoted = true;
    this.#promoted.push(request);
  }

  end(request: Request): void {
    for (const list of [this.waiting, this.underWay, this.#promoted]) remove(list, request);
  }
}

function remove(list: Request[], request: Request): void {
  const index = list.indexOf(request);
  if (index >= 0) list.splice(index, 1);
}

/** Keeps the order of arrival. */
function insert(list: Request[], request: Request): void {
  const index = list.findIndex(({ arrival }) => arrival > request.arrival);
  list.splice(index < 0 ? list.length : index, 0, request);
}
