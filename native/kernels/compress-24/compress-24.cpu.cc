#include "kernels/compress-24/compress-24.h"

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// A block that its pruning may make sparse.
struct Candidate {
  int32_t pruning;
  int32_t block;
  int32_t dense;      // its dense id
  uint32_t loss;      // bits that are in the order of the losses
  int32_t sparse;     // the sparse id that it gets, or -1
};

// Groups of four neighbours that are pruned together. A Groups holds 16 bits of each group: as many as fill a vector.
constexpr int kGroups = 2 * kLanes;
typedef uint16_t Groups __attribute__((vector_size(2 * kGroups)));
typedef int16_t Choice __attribute__((vector_size(2 * kGroups)));  // -1 for true, 0 for false

inline Groups choose(Choice choice, Groups yes, Groups no) { return choice ? yes : no; }

// What is kept of each group: the two stored elements, and the nibble that says which they are.
struct Kept {
  Groups first;
  Groups second;
  Groups nibble;
  Groups lost[4];  // magnitudes of elements that are not kept, 0 for kept ones
};

// four[i] is neighbour i of each group. Without `mask`, the two elements of largest magnitude are kept.
inline Kept keep(const Groups (&four)[4], const Groups* mask) {
  Kept result;
  Choice kept[4];
  Choice behind[4] = {};  // minus the number of neighbours that come before this one
  for (int i = 0; i < 4; ++i) result.lost[i] = four[i] & 0x7fff;
  for (int i = 0; i < 3; ++i) {
    for (int j = i + 1; j < 4; ++j) {
      const Choice larger = result.lost[j] > result.lost[i];
      behind[i] += larger;
      behind[j] += ~larger;
    }
  }
  for (int i = 0; i < 4; ++i) kept[i] = mask == nullptr ? behind[i] > -2 : mask[i] != 0;
  // If fewer than two elements are kept, zeros are stored for the lowest other places.
  Choice count = kept[0] + kept[1] + kept[2] + kept[3];
  Choice stored[4];
  Groups element[4];
  for (int i = 0; i < 4; ++i) {
    const Choice filled = ~kept[i] & (count > -2);
    count += filled;
    stored[i] = kept[i] | filled;
    element[i] = choose(kept[i], four[i], Groups{});
    result.lost[i] = choose(kept[i], Groups{}, result.lost[i]);
  }
  result.first = choose(stored[0], element[0], choose(stored[1], element[1], element[2]));
  result.second = choose(stored[3], element[3], choose(stored[2], element[2], element[1]));
  const Groups one = Groups{} + 1;
  const Groups first = choose(stored[0], Groups{}, choose(stored[1], one, one + one));
  const Groups second = choose(stored[3], one + 2, choose(stored[2], one + one, one));
  result.nibble = second << 2 | first;
  return result;
}

// Calls body(step, what is kept) for each step over a block. A step has kGroups groups. Of keys these are 4 * kGroups
// contiguous elements; of values they are kGroups dims of four tokens.
template <class Body>
void for_each_step(KvOperand operand, int dim, const uint16_t* dense, const uint8_t* mask, Body&& body) {
  const bool keys = operand == KvOperand::keys;
  const int steps = kBlock24Tokens * dim / (4 * kGroups);
  const int of_tokens = dim / kGroups;  // steps with the same four tokens
  for (int step = 0; step < steps; ++step) {
    const int origin = keys ? 4 * kGroups * step : step / of_tokens * 4 * dim + step % of_tokens * kGroups;
    Groups four[4];
    Groups masks[4];
    for (int i = 0; i < 4; ++i) {
      const int first = origin + (keys ? i : i * dim);
      const auto gather = [&](const auto* from) {
        Groups gathered = {};
        for (int n = 0; n < kGroups; ++n) gathered[n] = from[first + (keys ? 4 * n : n)];
        return gathered;
      };
      four[i] = gather(dense);
      if (mask != nullptr) masks[i] = gather(mask);
    }
    body(step, keep(four, mask == nullptr ? nullptr : masks));
  }
}

template <class T>
float loss_of(KvOperand operand, int dim, const uint16_t* dense, const uint8_t* mask) {
  Vec sum = {};
  for_each_step(operand, dim, dense, mask, [&](int, const Kept& kept) {
    T lost[4 * kGroups];
    std::memcpy(lost, kept.lost, sizeof lost);
    for (int n = 0; n < 4 * kGroups; n += kLanes) sum += load(lost + n);
  });
  return horizontal_sum(sum);
}

void compress_keys(int dim, const uint16_t* dense, const uint8_t* mask, uint16_t* non_zeros, uint32_t* metadata) {
  for_each_step(KvOperand::keys, dim, dense, mask, [&](int step, const Kept& kept) {
    uint16_t pairs[2 * kGroups];
    for (int n = 0; n < kGroups; ++n) {
      pairs[2 * n] = kept.first[n];
      pairs[2 * n + 1] = kept.second[n];
    }
    for (int n = 0; n < kGroups; n += 4) {
      const int element = 4 * (kGroups * step + n);
      const int token = element / dim;
      const int group = element % dim / 16;
      std::memcpy(non_zeros + key_non_zero(token, 8 * group, dim), pairs + 2 * n, 8 * sizeof(uint16_t));
      uint32_t meta = 0;
      for (int i = 0; i < 4; ++i) meta |= static_cast<uint32_t>(kept.nibble[n + i]) << 4 * i;
      const Meta16Place place = key_meta16(token, group, dim);
      metadata[place.word] |= meta << place.shift;
    }
  });
}

void compress_values(int dim, const uint16_t* dense, const uint8_t* mask, uint16_t* non_zeros, uint32_t* metadata) {
  const int of_tokens = dim / kGroups;
  for_each_step(KvOperand::values, dim, dense, mask, [&](int step, const Kept& kept) {
    uint16_t rows[2][kGroups];
    std::memcpy(rows[0], &kept.first, sizeof rows[0]);
    std::memcpy(rows[1], &kept.second, sizeof rows[1]);
    const int quad = step / of_tokens;
    for (int n = 0; n < kGroups; n += 8) {
      const int d = step % of_tokens * kGroups + n;
      for (int j = 0; j < 2; ++j) {
        std::memcpy(non_zeros + value_non_zero(2 * quad + j, d), rows[j] + n, 8 * sizeof(uint16_t));
      }
      for (int i = 0; i < 8; ++i) {
        const Meta16Place place = value_meta16(d + i, quad / 4);
        metadata[place.word] |= static_cast<uint32_t>(kept.nibble[n + i]) << (quad % 4 * 4 + place.shift);
      }
    }
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
        if (is_dense(entry)) candidates_[next++] = {p, block, entry, 0, -1};
      }
    }
    starts_[a.pruning_count] = next;
  }

  void run() {
    for_each_candidate([&](Candidate& candidate) { measure(candidate); });
    for_each_pruning([&](int32_t p) { choose(p); });
    for_each_candidate([&](Candidate& candidate) {
      if (candidate.sparse < 0) return;
      const int64_t words = sparse_block_words(a_.head_dim);
      uint16_t* non_zeros =
          static_cast<uint16_t*>(a_.non_zeros) + candidate.sparse * sparse_block_elements(a_.head_dim);
      uint32_t* metadata = a_.metadata + candidate.sparse * words;
      std::memset(metadata, 0, static_cast<size_t>(words) * sizeof(uint32_t));
      const auto compress = a_.operand == KvOperand::keys ? compress_keys : compress_values;
      compress(a_.head_dim, dense(candidate.dense), mask(candidate), non_zeros, metadata);
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
    return static_cast<uint16_t*>(a_.dense) + int64_t{id} * kBlock24Tokens * a_.head_dim;
  }
  const uint8_t* mask(const Candidate& candidate) const {
    if (a_.element_mask == nullptr) return nullptr;
    const int32_t head = a_.prunings[candidate.pruning].table_row % a_.kv_heads;
    return a_.element_mask + int64_t{head} * kBlock24Tokens * a_.head_dim;
  }

  void measure(Candidate& candidate) const {
    const int32_t p = candidate.pruning;
    if (a_.prunings[p].count == starts_[p + 1] - starts_[p]) return;
    if (a_.block_loss != nullptr) {
      const float given = a_.block_loss[int64_t{a_.prunings[p].table_row} * a_.table_width + candidate.block];
      uint32_t bits;
      std::memcpy(&bits, &given, sizeof bits);
      candidate.loss = rank_of_given_loss(given, bits);
      return;
    }
    const auto measure_loss = a_.dtype == DType::f16 ? loss_of<Half> : loss_of<Bfloat>;
    const float loss = measure_loss(a_.operand, a_.head_dim, dense(candidate.dense), mask(candidate));
    std::memcpy(&candidate.loss, &loss, sizeof loss);
    // All NaN count as one number, whatever their payload, as on CUDA.
    candidate.loss = loss == loss ? candidate.loss & 0x7fffffffu : 0x7fffffffu;
  }

  // Gives sparse ids to the blocks of least loss.
  void choose(int32_t p) const {
    const Pruning& pruning = a_.prunings[p];
    const auto count_up_to = [&](uint32_t loss) {
      int64_t count = 0;
      for (int64_t i = starts_[p]; i < starts_[p + 1]; ++i) count += candidates_[i].loss <= loss ? 1 : 0;
      return count;
    };
    // Finds, bit by bit, the least loss that at least `count` candidates do not exceed.
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
        row[candidate.block] = block_entry(BlockKind::sparse_24, candidate.sparse);
      } else if (candidate.dense >= pruning.freed_from) {
        do {
          ++vacated;
        } while (candidates_[vacated].sparse < 0 || candidates_[vacated].dense >= pruning.freed_from);
        const int32_t to = candidates_[vacated].dense;
        std::memcpy(dense(to), dense(candidate.dense),
                    static_cast<size_t>(kBlock24Tokens * a_.head_dim) * sizeof(uint16_t));
        row[candidate.block] = to;
      }
    }
  }

  const Compress24Arguments& a_;
  Workers& workers_;
  int64_t* starts_;  // the candidates of pruning p are starts_[p] .. starts_[p + 1] - 1, in block order
  Candidate* candidates_;
};

}  // namespace

void compress_24(const Compress24Arguments& a, Workers& workers) { Compression(a, workers).run(); }

}  // namespace KV_ISA
}  // namespace kv
