// What a thread block streams next. A warp that does nothing else plans it in advance: a ticket, a table or an index
// map takes as long to arrive as a piece of the cache, and would wait behind the pieces. Device code.
#pragma once

#include <cstdint>

#include "kernels/decode-attention-24/decode-attention-24-schedule.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "shared/cuda/stage-ring.cuda.h"
#include "shared/paged/paged-faults.h"

namespace kv {

template <typename Maps>
struct DecodeParameters24 {
  Attention24Arguments arguments;
  FaultSink faults;
  Tickets24* tickets;
  unsigned* arrivals;  // [entry], splits whose partial is written; zeros before and after
  void* partials;      // [split]
  Maps maps;
};

// Some consecutive blocks of a split, which the streaming warps of a thread block take in turn.
struct BlockRange24 {
  static constexpr int kMostBlocks = 32;  // one for each lane

  Split24 split;
  int rows;            // of the entry
  int fewest_visible;  // keys that the first row sees; no row sees fewer
  int first_block;     // of the entry
  int blocks;
  int first_warp;  // the warp that takes the first block
  bool begins;     // the first range of its split
  bool ends;       // the last range of its split
  bool nothing;    // no work is left
  // Entries of the index maps.
  int key_places[kMostBlocks];
  int value_places[kMostBlocks];

  // The first block that this warp takes.
  template <int kWarps>
  __device__ int first_of_warp() const {
    const int turn = static_cast<int>(threadIdx.x) / 32 - first_warp;
    return turn < 0 ? turn + kWarps : turn;
  }
};

// The next ranges of blocks, in shared memory.
struct Plan24 {
  static constexpr int kDepth = 2;  // with more, a thread block would take work tiles long before it computes them
  using Position = RingPosition<kDepth>;

  BlockRange24 ranges[kDepth];
  StageRing<kDepth> ring;
};

// Writes the plan. All lanes of one warp call it.
template <typename Parameters, int kWarps, typename WorkList>
class Planner24 {
 public:
  __device__ Planner24(const Parameters& parameters, const WorkList& work_list, Plan24& plan)
      : arguments_(parameters.arguments),
        faults_(parameters.faults),
        work_list_(work_list),
        splits_(work_list, *parameters.tickets),
        plan_(plan) {}

  // Plans the first range early, on an early work list, while the kernels ahead may still change the tables.
  __device__ void prepare() {
    splits_.begin(kWarps);
    prepared_ = splits_.next(false, split_);
    next_block_ = split_.first_block;
    if (prepared_) prefetch();
  }

  // Called when the kernels ahead are complete, before the work list is built: loads the first entries of the index
  // maps, so that they arrive meanwhile.
  __device__ void look_up() {
    const int block = next_block_ + lane_;
    if (block >= min(split_.end_block, arguments_.table_width)) return;
    const int64_t place = table_row() * arguments_.table_width + block;
    key_place_ = arguments_.block_table[place];
    value_place_ = arguments_.value_table[place];
  }

  // Called when the work list is built.
  __device__ void begin() {
    if (work_list_.is_early()) {
      split_.head = work_list_.head(split_.entry.cache_head);
      return;
    }
    prepared_ = false;
    split_ = {};
    next_block_ = 0;
    splits_.begin(kWarps);
  }

  // Adds a range when the oldest range has been read. If none is left, the plan says so and `add` returns false. It
  // takes small work tiles only if `small_tiles`.
  __device__ bool add(bool small_tiles) {
    plan_.ring.wait_empty(at_);
    BlockRange24& range = plan_.ranges[at_.stage];
    const bool begins = prepared_ || next_block_ >= split_.end_block;
    const bool more = prepared_ || !begins || splits_.next(small_tiles, split_);
    if (begins) next_block_ = split_.first_block;
    if (more) {
      if (!prepared_) look_up();
      write(range, begins);
    } else if (lane_ == 0) {
      range.nothing = true;
      range.blocks = 0;
    }
    prepared_ = false;
    __syncwarp();
    plan_.ring.fill_by_thread(at_);
    at_.advance();
    return more;
  }

 private:
  static constexpr int kBlocksAhead = 12;

  __device__ int64_t table_row() const {
    return work_list_.entries().table_row(split_.entry.cache_head, split_.head.slot);
  }

  // Prefetches the first blocks of the split into L2. Even lanes fetch keys, odd lanes values.
  __device__ void prefetch() const {
    const int block = split_.first_block + lane_ / 2;
    if (lane_ / 2 >= kBlocksAhead || block >= min(split_.end_block, arguments_.table_width)) return;
    const bool of_keys = lane_ % 2 == 0;
    const int32_t* table = of_keys ? arguments_.block_table : arguments_.value_table;
    const int place = __ldcg(table + table_row() * arguments_.table_width + block);
    const SparseBlocks24& sparse = of_keys ? arguments_.sparse_keys : arguments_.sparse_values;
    const int64_t row_bytes = int64_t{2} * arguments_.head_dim;
    if (names_block(place, BlockKind::sparse_24, sparse.block_count)) {
      const int64_t number = block_number(place);
      const int64_t bytes = kBlock24Tokens / 2 * row_bytes;
      const int words = sparse_block_words(arguments_.head_dim);
      ptx::prefetch(static_cast<const char*>(sparse.non_zeros) + number * bytes, bytes);
      ptx::prefetch(sparse.metadata + number * words, words * sizeof(uint32_t));
    } else if (names_dense(place, arguments_.block_count) && arguments_.token_stride == arguments_.head_dim) {
      ptx::prefetch(static_cast<const char*>(of_keys ? arguments_.keys : arguments_.values) +
                        int64_t{2} * place * arguments_.block_stride,
                    kBlock24Tokens * row_bytes);
    }
  }

  __device__ void write(BlockRange24& range, bool begins) {
    const int keys = split_.head.keys;
    // An entry without keys has a block in the work list, but nothing to read.
    const int end = min(split_.end_block, (keys + kBlock24Tokens - 1) / kBlock24Tokens);
    const int blocks = max(0, min(BlockRange24::kMostBlocks, end - next_block_));
    bool inside = true;
    if (lane_ < blocks) {
      const bool whole = (next_block_ + lane_ + 1) * kBlock24Tokens <= keys;
      inside = check(key_place_, whole, arguments_.has_sparse_keys ? arguments_.sparse_keys.block_count : 0) &&
               check(value_place_, whole, arguments_.has_sparse_values ? arguments_.sparse_values.block_count : 0);
      range.key_places[lane_] = key_place_;
      range.value_places[lane_] = value_place_;
    }
    inside = __all_sync(0xffffffffu, inside);
    const int first_block = next_block_;
    next_block_ += BlockRange24::kMostBlocks;
    if (lane_ != 0) return;
    range.split = split_;
    range.rows = work_list_.entries().rows(split_.head, split_.entry);
    range.fewest_visible = work_list_.entries().visible_keys(split_.head, split_.entry, 0);
    range.first_block = first_block;
    range.blocks = inside ? blocks : 0;  // a range with places out of range is reported and not read
    range.first_warp = (split_.list_block + first_block - split_.first_block) % kWarps;
    range.begins = begins;
    range.ends = next_block_ >= split_.end_block;
    range.nothing = false;
  }

  __device__ bool check(int place, bool whole, int sparse_blocks) const {
    if (names_dense(place, arguments_.block_count)) return true;
    if (names_block(place, BlockKind::sparse_24, sparse_blocks) && whole) return true;
    report_fault(faults_, PagedFault::block_out_of_range, place);
    return false;
  }

  const Attention24Arguments& arguments_;
  const FaultSink& faults_;
  const WorkList& work_list_;
  SplitIterator24<WorkList> splits_;
  Plan24& plan_;
  const int lane_ = threadIdx.x % 32;
  Plan24::Position at_;
  bool prepared_ = false;  // the first split is planned, but not added yet
  Split24 split_;
  int next_block_ = 0;  // of the split
  // Index map entries of the split's next blocks, one in each lane.
  int key_place_ = 0;
  int value_place_ = 0;
};

}  // namespace kv
