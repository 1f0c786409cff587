#include "kernels/select-by-mass/select-by-mass.h"

#include "kernels/select-by-mass/select-by-mass-lanes.cpu.h"
#include "runtime/workers.h"

namespace kv {
namespace KV_ISA {
namespace {

uint32_t score_order(float score) {
  const float unsigned_zero = score + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &unsigned_zero, sizeof bits);
  return order_of(bits);
}

// Tokens of greater orders are taken, and of this order those up to `last`.
struct Cut {
  uint32_t order;
  int32_t last;

  bool takes(uint32_t other, int32_t token) const { return other > order || (other == order && token <= last); }
};
constexpr Cut kTakesNone{kNothingTaken, -1};

struct Candidate {
  uint64_t share;
  uint32_t order;
  int32_t token;
};

// The best candidates, as few as have the wanted share, which all together have. Tokens ascend.
Cut find_cut(const Candidate* candidates, int32_t count, uint64_t wanted) {
  constexpr int kDigits = 256;
  uint32_t order = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    uint64_t sums[kDigits] = {};
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t other = candidates[i].order;
      if (shift == 24 || (other ^ order) >> (shift + 8) == 0) sums[other >> shift & (kDigits - 1)] += candidates[i].share;
    }
    uint32_t digit = kDigits - 1;
    for (; digit > 0 && sums[digit] < wanted; --digit) wanted -= sums[digit];
    order |= digit << shift;
  }
  for (int32_t i = 0; i < count; ++i) {
    if (candidates[i].order != order) continue;
    if (candidates[i].share >= wanted) return {order, candidates[i].token};
    wanted -= candidates[i].share;
  }
  return {order, INT32_MAX};
}

// What is found of a row and query head.
struct HeadChoice {
  HeadSum sum;
  Cut cut;
  float log_of_all;
  uint64_t taken;  // share of the tokens that it takes
  HeadWeights weights;
};

// Where a row's tokens are.
struct RowSlot {
  int32_t slot;  // -1 for a row that no batch entry has

  int32_t tokens(const SelectByMassArguments& a, int32_t kv_head) const {
    return slot < 0 ? 0 : a.key_counts[int64_t{slot} * a.kv_heads + kv_head];
  }
};

// NaN if a score is NaN.
float largest(const float* scores, int32_t count) {
  Vec most = splat(-__builtin_inff());
  VecInt odd = {};
  int32_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec own = load(scores + i);
    most = maximum(most, own);
    odd |= own != own;
  }
  float best = horizontal_maximum(most);
  for (int lane = 0; lane < kLanes; ++lane) best = odd[lane] != 0 ? __builtin_nanf("") : best;
  for (; i < count && best == best; ++i) best = scores[i] <= best ? best : scores[i];
  return best;
}

// The same, of ranges of scores.
float largest(const float* ranges, int32_t parts, int32_t count) {
  float best = -__builtin_inff();
  for (int32_t part = 0; part < parts && count > 0 && best == best; ++part) {
    const float most = ranges[2 * part + 1];
    best = most <= best ? best : most;
  }
  return best;
}

// A bit for each token.
constexpr int64_t mark_words(const SelectByMassArguments& a) { return (int64_t{a.score_tokens} + 31) / 32; }

void mark(uint32_t* marks, int32_t token) { marks[token / 32] |= 1u << token % 32; }

// Memory of a worker that chooses. Near tokens are those of which shares are put into bins.
struct ChoiceRoom {
  uint64_t* sums;         // kShareBins
  Candidate* candidates;  // of all tokens
  int32_t* near;          // tokens; room for all, and kLanes more
  uint32_t* fixed;        // how far they are below the best one; the same room

  static size_t bytes(const SelectByMassArguments& a) {
    const auto tokens = static_cast<size_t>(a.score_tokens);
    return kShareBins * sizeof(uint64_t) + tokens * sizeof(Candidate) + 2 * (tokens + kLanes) * sizeof(int32_t);
  }
  ChoiceRoom(const SelectByMassArguments& a, void* memory)
      : sums(static_cast<uint64_t*>(memory)),
        candidates(reinterpret_cast<Candidate*>(sums + kShareBins)),
        near(reinterpret_cast<int32_t*>(candidates + a.score_tokens)),
        fixed(reinterpret_cast<uint32_t*>(near + a.score_tokens + kLanes)) {}
};

// The choice of one row and query head.
class Choice {
 public:
  Choice(const SelectByMassArguments& a, int64_t row_head, int32_t count, const ChoiceRoom& room)
      : a_(a), row_head_(row_head), scores_(a.scores + row_head * a.score_tokens), count_(count), room_(room) {}

  // `marks` are clear.
  HeadChoice make(uint32_t* marks) {
    const float dense = a_.dense_log_sum_exp == nullptr ? -__builtin_inff() : a_.dense_log_sum_exp[row_head_];
    most_ = a_.ranges == nullptr ? largest(scores_, count_) : largest(a_.ranges + row_head_ * a_.range_parts * 2, a_.range_parts, count_);
    HeadChoice choice{{most_, 0}, kTakesNone, 0, 0, {}};
    HeadSum& sum = choice.sum;
    if (!(dense < __builtin_inff())) sum.most = __builtin_nanf("");
    if (!sum.is_sound() || sum.most == -__builtin_inff()) return choice;

    sum.total = find_near<true>(0, kReach[0]);
    choice.log_of_all = log_of_all(sum, dense);
    const uint64_t wanted = wanted_share(sum, dense, a_.tau);
    if (wanted == 0) return choice;
    uint64_t missing = wanted;
    const int32_t cut_bin = find_bin(missing);
    const int32_t candidates = list_bin(cut_bin);
    choice.cut = find_cut(room_.candidates, candidates, missing);
    choice.taken = wanted - missing;
    for (int32_t i = 0; i < candidates; ++i) {
      const Candidate& candidate = room_.candidates[i];
      if (!choice.cut.takes(candidate.order, candidate.token)) continue;
      choice.taken += candidate.share;
      mark(marks, candidate.token);
    }
    for (int32_t i = 0; i < found_; ++i) {
      if (bin_of(room_.fixed[i]) < cut_bin) mark(marks, room_.near[i]);
    }
    return choice;
  }

 private:
  // How far below the best one tokens are near, and how far if these have too little share.
  static constexpr int kReach[] = {8, 12, 18, static_cast<int>(kNoShareBelow)};

  // Adds tokens whose scores are less than `reach`, and not less than `before`, below the best one to those that are near.
  // Gives the share of all tokens, if it is asked for.
  template <bool with_total>
  uint64_t find_near(int before, int reach) {
    const Vec from = splat(static_cast<float>(before)), to = splat(static_cast<float>(reach));
    VecLong sums = {};
    int32_t token = 0;
    for (; token + kLanes <= count_; token += kLanes) {
      const Vec below = most_ - load(scores_ + token);
      const VecInt near = (below < to) & (below >= from);
      const VecInt counts = with_total ? below < kNoShareBelow : near;
      const VecWord fixed = fixed_where(below, counts);
      if (with_total) {
        const LaneShares shares = shares_of_fixed(fixed, counts);
        sums += shares.even + shares.odd;
      }
      add_near(token, fixed, near);
    }
    uint64_t total = 0;
    for (int i = 0; i < kLanes / 2; ++i) total += sums[i];
    for (; token < count_; ++token) {
      const float below = most_ - scores_[token];
      if (with_total) total += share_below(below);
      if (!(below < static_cast<float>(reach) && below >= static_cast<float>(before))) continue;
      room_.near[found_] = token;
      room_.fixed[found_++] = fixed_below(below);
    }
    return total;
  }

  void add_near(int32_t token, VecWord fixed, VecInt near) {
#if defined(__AVX512F__)
    const __mmask16 lanes = _mm512_movepi32_mask(reinterpret_cast<__m512i>(near));
    const __m512i tokens = reinterpret_cast<__m512i>(token + VecInt{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
    _mm512_storeu_si512(room_.near + found_, _mm512_maskz_compress_epi32(lanes, tokens));
    _mm512_storeu_si512(room_.fixed + found_, _mm512_maskz_compress_epi32(lanes, reinterpret_cast<__m512i>(fixed)));
    found_ += __builtin_popcount(lanes);
#else
    for (uint32_t bits = bits_of(near); bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      room_.near[found_] = token + lane;
      room_.fixed[found_++] = fixed[lane];
    }
#endif
  }

  // Puts the shares of near tokens into bins, and gives the bin of the last one that is taken. `wanted` is then what its
  // tokens must have.
  int32_t find_bin(uint64_t& wanted) {
    int32_t bin = 0;
    for (int32_t first = 0, pass = 0;; ++pass) {
      if (pass > 0) find_near<false>(kReach[pass - 1], kReach[pass]);
      const int32_t bins = kReach[pass] * kUnitBins;
      std::memset(room_.sums + bin, 0, (bins - bin) * sizeof(uint64_t));
      for (; first + kLanes <= found_; first += kLanes) {
        VecWord fixed;
        std::memcpy(&fixed, room_.fixed + first, sizeof fixed);
        uint64_t shares[kLanes];
        shares_of_fixed(fixed, ~VecInt{}).store(shares);
        for (int lane = 0; lane < kLanes; ++lane) room_.sums[bin_of(room_.fixed[first + lane])] += shares[lane];
      }
      for (; first < found_; ++first) room_.sums[bin_of(room_.fixed[first])] += share_of_fixed(room_.fixed[first]);
      while (bin < bins && room_.sums[bin] < wanted) wanted -= room_.sums[bin++];
      if (bin < bins) return bin;
    }
  }

  // Lists the near tokens of a bin, ascending, and gives their number.
  int32_t list_bin(int32_t bin) const {
    int32_t found = 0;
    for (int32_t i = 0; i < found_; ++i) {
      if (bin_of(room_.fixed[i]) != bin) continue;
      const int32_t token = room_.near[i];
      room_.candidates[found++] = {share_of_fixed(room_.fixed[i]), score_order(scores_[token]), token};
    }
    return found;
  }

  const SelectByMassArguments& a_;
  const int64_t row_head_;
  const float* scores_;
  const int32_t count_;
  const ChoiceRoom& room_;
  float most_ = 0;
  int32_t found_ = 0;
};

// Tokens of which one task writes the list.
constexpr int32_t kChunkTokens = 2048;
constexpr int64_t list_chunks(const SelectByMassArguments& a) { return (int64_t{a.score_tokens} + kChunkTokens - 1) / kChunkTokens; }

// Where the tables of all heads and lists are.
struct Tables {
  HeadChoice* choices;    // [row, query_head]
  uint32_t* head_marks;   // [row, query_head, word]
  uint32_t* marks;        // [row, kv_head, word]: of the heads' together
  int32_t* chunk_starts;  // [row, kv_head, chunk]: how many listed tokens are in front
};

// The list of a row and kv head.
class List {
 public:
  List(const SelectByMassArguments& a, const Tables& tables, int64_t row, int32_t kv_head, int32_t slot, int32_t tokens)
      : a_(a),
        index_(row * a.kv_heads + kv_head),
        tokens_(tokens),
        choices_(tables.choices + index_ * a.group()),
        scores_(a.scores + index_ * a.group() * a.score_tokens),
        head_marks_(tables.head_marks + index_ * a.group() * mark_words(a)),
        marks_(tables.marks + index_ * mark_words(a)),
        chunk_starts_(tables.chunk_starts + index_ * list_chunks(a)),
        cache_head_(int64_t{slot} * a.kv_heads + kv_head) {}

  // Settles which tokens are listed, and what their weights are made of. `candidates` has room for all tokens.
  void settle(Candidate* candidates) const {
    int32_t count = 0;
    for (int32_t word = 0; word * 32 < tokens_; ++word) {
      uint32_t all = 0;
      for (int32_t head = 0; head < a_.group(); ++head) all |= head_marks_[head * mark_words(a_) + word];
      marks_[word] = all;
      count += __builtin_popcount(all);
    }
    if (count > a_.most_tokens()) count = keep_best(candidates);
    int32_t before = 0;
    for (int32_t chunk = 0; chunk < list_chunks(a_); ++chunk) {
      chunk_starts_[chunk] = before;
      for_each_word(chunk, [&](int32_t word) { before += __builtin_popcount(marks_[word]); });
    }
    for (int32_t head = 0; head < a_.group(); ++head) {
      HeadChoice& choice = choices_[head];
      choice.weights = weights_of(choice.sum, choice.taken, a_.missing);
      a_.log_sum_exp[index_ * a_.group() + head] = choice.weights.log_sum_exp;
    }
    a_.counts[index_] = mean_row(count) >= 0 ? count + 1 : count;
    if (mean_row(count) >= 0) write_mean(count);
  }

  // Writes the rows of the tokens of a chunk, and their weights.
  void write(int32_t chunk) const {
    int32_t listed[kChunkTokens + kLanes];
    int32_t count = 0;
    for_each_word(chunk, [&](int32_t word) { count += list_bits(marks_[word], word * 32, listed + count); });
    for (int32_t i = count; i % kLanes != 0; ++i) listed[i] = 0;
    const int64_t first = index_ * a_.capacity + chunk_starts_[chunk];
    for (int32_t i = 0; i < count; ++i) {
      const int32_t block = a_.block_table[cache_head_ * a_.table_width + listed[i] / kValueBlockTokens];
      a_.value_rows[first + i] = block * kValueBlockTokens + listed[i] % kValueBlockTokens;
    }
    if (a_.weights == nullptr) return;
    for (int32_t head = 0; head < a_.group(); ++head) {
      for (int32_t i = 0; i < count; i += kLanes) write_weights(head, first + i, listed + i, count - i < kLanes ? count - i : kLanes);
    }
  }

 private:
  // Of up to kLanes listed tokens.
  void write_weights(int32_t head, int64_t first, const int32_t* tokens, int32_t count) const {
    const HeadChoice& choice = choices_[head];
    VecWord at;
    std::memcpy(&at, tokens, sizeof at);
    const VecInt taken = -reinterpret_cast<VecInt>(gather(head_marks_ + head * mark_words(a_), at >> 5) >> (at & 31) & 1);
    const Vec scores = gather_where(scores_ + int64_t{head} * a_.score_tokens, at, taken, splat(-__builtin_inff()));
    Vec weights = shares_below(choice.sum.most - scores).numbers() / splat(static_cast<float>(choice.weights.sum));
    if (a_.value_scales != nullptr) {
      float scales[kLanes] = {};
      for (int32_t i = 0; i < count; ++i) scales[i] = scale(a_.value_rows[first + i]);
      weights *= load(scales);
    }
    float own[kLanes];
    store(own, weights);
    for (int32_t i = 0; i < count; ++i) a_.weights[(first + i) * a_.group() + head] = own[i];
  }

  void write_mean(int32_t count) const {
    const int32_t row = mean_row(count);
    const int64_t at = index_ * a_.capacity + count;
    a_.value_rows[at] = row;
    if (a_.weights == nullptr) return;
    for (int32_t head = 0; head < a_.group(); ++head) a_.weights[at * a_.group() + head] = choices_[head].weights.missing * scale(row);
  }

  float score(int32_t head, int32_t token) const { return scores_[int64_t{head} * a_.score_tokens + token]; }
  bool takes(int32_t head, int32_t token) const {
    return head_marks_[head * mark_words(a_) + token / 32] >> token % 32 & 1;
  }

  // Calls body(word) for the words of marks that a chunk has.
  template <class Body>
  void for_each_word(int32_t chunk, Body&& body) const {
    const int32_t end = chunk * kChunkTokens + kChunkTokens < tokens_ ? chunk * kChunkTokens + kChunkTokens : tokens_;
    for (int32_t word = chunk * (kChunkTokens / 32); word * 32 < end; ++word) body(word);
  }

  // Leaves the marks of the largest shares that there is room for, and gives their number.
  int32_t keep_best(Candidate* candidates) const {
    int32_t count = 0;
    for (int32_t word = 0; word * 32 < tokens_; ++word) {
      for (uint32_t left = marks_[word]; left != 0; left &= left - 1) {
        const int32_t token = word * 32 + __builtin_ctz(left);
        Candidate& candidate = candidates[count++] = {1, 0, token};
        for (int32_t head = 0; head < a_.group(); ++head) {
          if (!takes(head, token)) continue;
          const uint32_t order = score_order(score(head, token) - choices_[head].log_of_all);
          candidate.order = order > candidate.order ? order : candidate.order;
        }
      }
    }
    const auto room = static_cast<uint64_t>(a_.most_tokens());
    const Cut cut = room == 0 ? kTakesNone : find_cut(candidates, count, room);
    int32_t kept = 0;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t token = candidates[i].token;
      if (cut.takes(candidates[i].order, token)) {
        ++kept;
        continue;
      }
      marks_[token / 32] &= ~(1u << token % 32);
    }
    for (int32_t head = 0; head < a_.group(); ++head) choices_[head].taken = taken_share(head);
    return kept;
  }

  // Of the listed tokens.
  uint64_t taken_share(int32_t head) const {
    int32_t taken[2 * kChunkTokens];
    VecLong sums = {};
    VecInt lanes = {};
    for (int i = 0; i < kLanes; ++i) lanes[i] = i;
    int32_t count = 0;
    const auto add = [&](int32_t end) {
      for (int32_t i = end; i % kLanes != 0; ++i) taken[i] = 0;
      for (int32_t i = 0; i < end; i += kLanes) {
        VecWord at;
        std::memcpy(&at, taken + i, sizeof at);
        const Vec scores = gather_where(scores_ + int64_t{head} * a_.score_tokens, at, lanes + i < end, splat(-__builtin_inff()));
        const LaneShares shares = shares_below(choices_[head].sum.most - scores);
        sums += shares.even + shares.odd;
      }
    };
    for (int32_t word = 0; word * 32 < tokens_; ++word) {
      count += list_bits(marks_[word] & head_marks_[head * mark_words(a_) + word], word * 32, taken + count);
      if (count < kChunkTokens) continue;
      add(count);
      count = 0;
    }
    add(count);
    uint64_t total = 0;
    for (int i = 0; i < kLanes / 2; ++i) total += sums[i];
    return total;
  }

  // -1 if there is none.
  int32_t mean_row(int32_t count) const {
    return a_.missing == MissingMass::mean_value && count > 0 ? a_.mean_rows[cache_head_] : -1;
  }

  float scale(int32_t value_row) const { return a_.value_scales == nullptr ? 1 : bfloat_to_float(a_.value_scales[value_row]); }

  const SelectByMassArguments& a_;
  int64_t index_;
  int32_t tokens_;
  HeadChoice* choices_;
  const float* scores_;
  const uint32_t* head_marks_;
  uint32_t* marks_;
  int32_t* chunk_starts_;
  int64_t cache_head_;
};

}  // namespace

void select_by_mass(const SelectByMassArguments& a, Workers& workers) {
  const auto rows = static_cast<size_t>(a.query_tokens);
  const auto heads = static_cast<size_t>(a.query_heads);
  const auto kv_heads = static_cast<size_t>(a.kv_heads);
  const size_t lists = rows * kv_heads;
  const auto words = static_cast<size_t>(mark_words(a));
  const auto chunks = static_cast<size_t>(list_chunks(a));
  const size_t word_bytes = ((rows * heads + lists) * words + lists * chunks) * sizeof(uint32_t);
  auto* choices = static_cast<HeadChoice*>(workers.shared_scratch(rows * (heads * sizeof(HeadChoice) + sizeof(RowSlot)) + word_bytes));
  auto* slots = reinterpret_cast<RowSlot*>(choices + rows * heads);
  auto* head_marks = reinterpret_cast<uint32_t*>(slots + rows);
  uint32_t* marks = head_marks + rows * heads * words;
  const Tables tables{choices, head_marks, marks, reinterpret_cast<int32_t*>(marks + lists * words)};
  for (size_t row = 0; row < rows; ++row) slots[row] = {-1};
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    for (int32_t row = a.query_start[entry]; row < a.query_start[entry + 1]; ++row) slots[row] = {a.slots[entry]};
  }
  workers.for_each(rows * heads, [&](size_t index, int worker) {
    const ChoiceRoom room(a, workers.scratch(worker, ChoiceRoom::bytes(a)));
    const auto kv_head = static_cast<int32_t>(index % heads) / a.group();
    const int32_t tokens = slots[index / heads].tokens(a, kv_head);
    uint32_t* own_marks = head_marks + index * words;
    std::memset(own_marks, 0, words * sizeof(uint32_t));
    choices[index] = Choice(a, static_cast<int64_t>(index), tokens, room).make(own_marks);
  });
  const auto list_of = [&](size_t index) {
    const RowSlot slot = slots[index / kv_heads];
    const auto kv_head = static_cast<int32_t>(index % kv_heads);
    return List(a, tables, static_cast<int64_t>(index / kv_heads), kv_head, slot.slot, slot.tokens(a, kv_head));
  };
  workers.for_each(lists, [&](size_t index, int worker) {
    list_of(index).settle(static_cast<Candidate*>(workers.scratch(worker, static_cast<size_t>(a.score_tokens) * sizeof(Candidate))));
  });
  workers.for_each(lists * chunks, [&](size_t index, int) { list_of(index / chunks).write(static_cast<int32_t>(index % chunks)); });
}

}  // namespace KV_ISA
}  // namespace kv
