const none = -1;

/** Which blocks a bounded memory holds: the least recently used one leaves, and none while there is room. */
export class BlockCache {
  /** The place of each block. */
  readonly #places = new Map<number, number>();
  readonly #blocks: Float64Array;
  readonly #older: Int32Array;
  readonly #newer: Int32Array;
  readonly #free: number[] = [];
  #unused = 0;
  #oldest = none;
  #newest = none;
  #capacity: number;

  /** @param places the largest capacity there will be */
  constructor(places: number) {
    this.#blocks = new Float64Array(places);
    this.#older = new Int32Array(places);
    this.#newer = new Int32Array(places);
    this.#capacity = places;
  }

  get size(): number {
    return this.#places.size;
  }

  /** The blocks, from the least recently used one on. */
  get blocks(): number[] {
    const blocks: number[] = [];
    for (let place = this.#oldest; place !== none; place = this.#newer[place] ?? none) blocks.push(this.#blocks[place] ?? NaN);
    return blocks;
  }

  /** From now on it holds at most so many blocks. */
  resize(capacity: number): void {
    this.#capacity = capacity;
    while (this.#places.size > capacity) this.#drop(this.#oldest);
  }

  /** Reads a block, which is loaded where it was not there. Returns whether it was. */
  read(block: number): boolean {
    const place = this.#places.get(block);
    if (place !== undefined) {
      this.#unlink(place);
      this.#append(place);
      return true;
    }
    if (this.#capacity === 0) return false;
    if (this.#places.size >= this.#capacity) this.#drop(this.#oldest);
    this.#append(this.#put(block));
    return false;
  }

  /** Takes a block that was not read yet, if it lacks it and has room: it leaves before all others. */
  offer(block: number): void {
    if (this.#places.size >= this.#capacity || this.#places.has(block)) return;
    const place = this.#put(block);
    this.#older[place] = none;
    this.#newer[place] = this.#oldest;
    if (this.#oldest === none) this.#newest = place;
    else this.#older[this.#oldest] = place;
    this.#oldest = place;
  }

  /** Drops the blocks whose numbers are from `first` to `end - 1`. */
  forget(first: number, end: number): void {
    for (const [block, place] of this.#places) if (block >= first && block < end) this.#drop(place);
  }

  #drop(place: number): void {
    this.#unlink(place);
    this.#places.delete(this.#blocks[place] ?? NaN);
    this.#free.push(place);
  }

  #put(block: number): number {
    const place = this.#free.pop() ?? this.#unused++;
    this.#blocks[place] = block;
    this.#places.set(block, place);
    return place;
  }

  #append(place: number): void {
    this.#older[place] = this.#newest;
    this.#newer[place] = none;
    if (this.#newest === none) this.#oldest = place;
    else this.#newer[this.#newest] = place;
    this.#newest = place;
  }

  #unlink(place: number): void {
    const [older = none, newer = none] = [this.#older[place], this.#newer[place]];
    if (older === none) this.#oldest = newer;
    else this.#newer[older] = newer;
    if (newer === none) this.#newest = older;
    else this.#older[newer] = older;
  }
}
