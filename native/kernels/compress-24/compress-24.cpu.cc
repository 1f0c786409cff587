#include "kernels/compress-24/compress-24.h"

#include "kernels/simd.h"
#include "kernels/sparse-lines.h"

namespace kv {
namespace KV_ISA {
namespace {

// A block that a pruning may make sparse.
struct Candidate {
  int32_t pruning;
  int32_t block;
  int32_t dense;      // its dense id
  uint32_t loss;      // the bits of the loss without their sign: they compare as the losses do
  int32_t sparse;     // the sparse id that it is given, or -1
};

// Which of four neighbours are kept: bit i for neighbour i.
uint32_t largest_two(const uint16_t (&four)[4]) {
  uint32_t kept = 0;
  for (int i = 0; i < 4; ++i) {
    int before = 0;
    for (int j = 0; j < 4; ++j) {
      const int32_t difference = (four[j] & 0x7fff) - (four[i] & 0x7fff);
      before += difference > 0 || (difference == 0 && j < i) ? 1 : 0;
    }
    kept |= before < 2 ? 1u << i : 0u;
  }
  return kept;
}

// The places that are stored: those that are kept, and the lowest others where fewer than two are.
uint32_t stored_places(uint32_t kept) {
  while (__builtin_popcount(kept) < 2) kept |= ~kept & (kept + 1);
  return kept;
}

// Calls body(line, group of 16, number of four within it, its elements, which are kept) for all of a block.
template <class Lines, class Body>
void for_each_four(const Lines& lines, const uint16_t* dense, const uint8_t* mask, Body&& body) {
  for (int line = 0; line < lines.lines(); ++line) {
    for (int group = 0; group < lines.groups(); ++group) {
      for (int n = 0; n < 4; ++n) {
        uint16_t four[4];
        uint32_t kept = 0;
        for (int i = 0; i < 4; ++i) {
          const int place = lines.dense(line, 16 * group + 4 * n + i);
          four[i] = dense[place];
          if (mask != nullptr) kept |= mask[place] != 0 ? 1u << i : 0u;
        }
        body(line, group, n, four, mask != nullptr ? kept : largest_two(four));
      }
    }
  }
}

template <class T, class Lines>
float loss_of(const Lines& lines, const uint16_t* dense, const uint8_t* mask) {
  double loss = 0;
  for_each_four(lines, dense, mask, [&](int, int, int, const uint16_t(&four)[4], uint32_t kept) {
    for (int i = 0; i < 4; ++i) {
      const uint16_t magnitude = four[i] & 0x7fff;
      if ((kept >> i & 1) == 0) loss += to_float(T{magnitude});
    }
  });
  return static_cast<float>(loss);
}

template <class Lines>
void compress(const Lines& lines, const uint16_t* dense, const uint8_t* mask, uint16_t* non_zeros,
              uint32_t* metadata) {
  std::memset(metadata, 0, static_cast<size_t>(sparse_block_words(lines.dim)) * sizeof(uint32_t));
  for_each_four(lines, dense, mask, [&](int line, int group, int n, const uint16_t(&four)[4], uint32_t kept) {
    const uint32_t places = stored_places(kept);
    const int first = __builtin_ctz(places);
    const int second = 31 - __builtin_clz(places);
    const int number = 8 * group + 2 * n;
    non_zeros[lines.non_zero(line, number)] = (kept >> first & 1) != 0 ? four[first] : uint16_t{0};
    non_zeros[lines.non_zero(line, number + 1)] = (kept >> second & 1) != 0 ? four[second] : uint16_t{0};
    const Meta16Place place = lines.meta16(line, group);
    metadata[place.word] |= static_cast<uint32_t>(second << 2 | first) << (4 * n + place.shift);
  });
}

class Compression {
 public:
  Compression(const Compress24Arguments& a, Workers& workers) : a_(a), workers_(workers) {
    int64_t most = 0;
    for (int32_t p = 0; p < a.pruning_count; ++p) most += a.prunings[p].end_block - a.prunings[p].first_block;
    const size_t start_bytes = (static_cast<size_t>(a.pruning_count) + 1) * sizeof(int64_t);
    starts_ = static_cast<int64_t*>(
        workers.shared_scratch(start_bytes + static_cast<size_t>(most) * sizeof(Candidate)));
    candidates_ = reinterpret_cast<Candidate*>(starts_ + a.pruning_count + 1);
    int64_t next = 0;
    for (int32_t p = 0; p < a.pruning_count; ++p) {
      starts_[p] = next;
      const Pruning& pruning = a.prunings[p];
      for (int32_t block = pruning.first_block; block < pruning.end_block; ++block) {
        const int32_t entry = a.table[int64_t{pruning.table_row} * a.table_width + block];
        if (entry > 0) candidates_[next++] = {p, block, entry - 1, 0, -1};
      }
    }
    starts_[a.pruning_count] = next;
  }

  void run() {
    for_each_candidate([&](Candidate& candidate) { measure(candidate); });
    for_each_pruning([&](int32_t p) { choose(p); });
    for_each_candidate([&](Candidate& candidate) {
      if (candidate.sparse < 0) return;
      with_lines(a_.operand, a_.head_dim, [&](const auto& lines) {
        compress(lines, dense(candidate.dense), mask(candidate),
                 static_cast<uint16_t*>(a_.non_zeros) + candidate.sparse * sparse_block_elements(a_.head_dim),
                 a_.metadata + candidate.sparse * sparse_block_words(a_.head_dim));
      });
    });
    for_each_pruning([&](int32_t p) { move(p); });
  }

 private:
  template <class Body>
  void for_each_candidate(Body&& body) {
    workers_.for_each(static_cast<size_t>(starts_[a_.pruning_count]), [&](size_t i, int) { body(candidates_[i]); });
  }
  template <class Body>
  void for_each_pruning(Body&& body) {
    workers_.for_each(static_cast<size_t>(a_.pruning_count), [&](size_t p, int) { body(static_cast<int32_t>(p)); });
  }

  uint16_t* dense(int32_t id) const {
    return static_cast<uint16_t*>(a_.dense) + int64_t{id} * kMixedBlockTokens * a_.head_dim;
  }
  const uint8_t* mask(const Candidate& candidate) const {
    if (a_.element_mask == nullptr) return nullptr;
    const int32_t head = a_.prunings[candidate.pruning].table_row % a_.kv_heads;
    return a_.element_mask + int64_t{head} * kMixedBlockTokens * a_.head_dim;
  }

  void measure(Candidate& candidate) const {
    const int32_t p = candidate.pruning;
    if (a_.prunings[p].count == starts_[p + 1] - starts_[p]) return;
    with_lines(a_.operand, a_.head_dim, [&](const auto& lines) {
      const uint16_t* block = dense(candidate.dense);
      const float loss = a_.dtype == DType::f16 ? loss_of<Half>(lines, block, mask(candidate))
                                                : loss_of<Bfloat>(lines, block, mask(candidate));
      std::memcpy(&candidate.loss, &loss, sizeof loss);
      candidate.loss &= 0x7fffffffu;
    });
  }

  // Gives the blocks of least loss their sparse ids.
  void choose(int32_t p) const {
    const Pruning& pruning = a_.prunings[p];
    const auto count_up_to = [&](uint32_t loss) {
      int64_t count = 0;
      for (int64_t i = starts_[p]; i < starts_[p + 1]; ++i) count += candidates_[i].loss <= loss ? 1 : 0;
      return count;
    };
    // The least loss that `count` candidates do not exceed, a bit at a time.
    uint32_t limit = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
      if (count_up_to(limit + (bit - 1)) < pruning.count) limit += bit;
    }
    int64_t at_limit = limit == 0 ? pruning.count : pruning.count - count_up_to(limit - 1);
    const int32_t* id = a_.ids + pruning.first_id;
    for (int64_t i = starts_[p]; i < starts_[p + 1]; ++i) {
      Candidate& candidate = candidates_[i];
      if (candidate.loss > limit || (candidate.loss == limit && at_limit-- <= 0)) continue;
      candidate.sparse = *id++;
    }
  }

  // Moves dense blocks out of the ids that become free, and updates the map.
  void move(int32_t p) const {
    const Pruning& pruning = a_.prunings[p];
    int32_t* row = a_.table + int64_t{pruning.table_row} * a_.table_width;
    int64_t vacated = starts_[p] - 1;
    for (int64_t i = starts_[p]; i < starts_[p + 1]; ++i) {
      const Candidate& candidate = candidates_[i];
      if (candidate.sparse >= 0) {
        row[candidate.block] = -(candidate.sparse + 1);
      } else if (candidate.dense >= pruning.freed_from) {
        do {
          ++vacated;
        } while (candidates_[vacated].sparse < 0 || candidates_[vacated].dense >= pruning.freed_from);
        const int32_t to = candidates_[vacated].dense;
        std::memcpy(dense(to), dense(candidate.dense),
                    static_cast<size_t>(kMixedBlockTokens * a_.head_dim) * sizeof(uint16_t));
        row[candidate.block] = to + 1;
      }
    }
  }

  const Compress24Arguments& a_;
  Workers& workers_;
  int64_t* starts_;  // pruning p has the candidates starts_[p] .. starts_[p + 1] - 1, in block order
  Candidate* candidates_;
};

}  // namespace

void compress_24(const Compress24Arguments& a, Workers& workers) { Compression(a, workers).run(); }

}  // namespace KV_ISA
}  // namespace kv
