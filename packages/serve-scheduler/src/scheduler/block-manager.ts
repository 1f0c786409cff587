import { BlockIds } from '@kv/sparse-core/native';

interface Holding {
  /** Blocks of one layer on the device. */
  device: number;
  /** Numbers in host memory; each stands for a block of every kv head. */
  readonly host: number[];
  /** Blocks in host memory that tokens to come may need. */
  promised: number;
}

/** Counts which requests hold how many blocks, on the device between their steps and in host memory. */
export class BlockManager<Owner extends object> {
  readonly #host: BlockIds;
  readonly #holdings = new Map<Owner, Holding>();
  #device = 0;

  /** @param hostBlocks blocks of each kv head */
  constructor(hostBlocks: number) {
    this.#host = new BlockIds('host blocks', hostBlocks);
  }

  /** Blocks of one layer that are held on the device whatever the next step is. */
  get device(): number {
    return this.#device;
  }

  /** Blocks of each kv head that are held in host memory. */
  get host(): number {
    return this.#host.count - this.#host.available;
  }

  /** The numbers of the blocks that an owner has in host memory, in the order of its tokens. */
  hostOf(owner: Owner): readonly number[] {
    return this.#holdings.get(owner)?.host ?? [];
  }

  /** Takes host memory for `now` blocks of each kv head, and promises it for `later` ones. False when it is not there. */
  begin(owner: Owner, now: number, later: number): boolean {
    if (now + later > this.#unpromised) return false;
    this.#holdings.set(owner, { device: 0, host: [...this.#host.allocate(now)], promised: later });
    this.#host.promised += later;
    return true;
  }

  /** Says how many blocks of one layer an owner holds on the device. */
  hold(owner: Owner, blocks: number): void {
    const holding = this.#holdings.get(owner);
    if (holding === undefined) return;
    this.#device += blocks - holding.device;
    holding.device = blocks;
  }

  /** Has an owner hold so many blocks of each kv head in host memory. False when there is no room. */
  grow(owner: Owner, blocks: number): boolean {
    const holding = this.#holdings.get(owner);
    if (holding === undefined) return false;
    while (holding.host.length < blocks) {
      if (holding.promised > 0) {
        holding.promised -= 1;
        this.#host.promised -= 1;
      } else if (this.#unpromised === 0) {
        return false;
      }
      holding.host.push(...this.#host.allocate(1));
    }
    return true;
  }

  /** Gives back all that an owner holds. */
  release(owner: Owner): void {
    const holding = this.#holdings.get(owner);
    if (holding === undefined) return;
    this.#holdings.delete(owner);
    this.#device -= holding.device;
    this.#host.promised -= holding.promised;
    this.#host.free(Int32Array.from(holding.host));
  }

  get #unpromised(): number {
    return this.#host.available - this.#host.promised;
  }
}
