#include "kernels/select-by-mass/select-by-mass.h"

#include "kernels/select-by-mass/select-by-mass-shares.h"
#include "runtime/workers.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr BinFactors kBinFactors;

constexpr int kUnitBins = kShareBins / static_cast<int>(kNoShareBelow);

uint64_t share_below(float below) {
  if (!(below < kNoShareBelow)) return 0;
  const uint32_t fixed = fixed_below(below);
  const uint32_t factor = kBinFactors.of[bin_of(fixed)];
  return share(share_bits(fixed, factor), factor & 0xff);
}

typedef uint32_t VecWord __attribute__((vector_size(kLanes * 4)));
typedef uint64_t VecLong __attribute__((vector_size(kLanes * 4)));

// The bit of each lane whose integer is -1. The others are 0.
uint32_t bits_of(VecInt lanes) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(lanes));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(lanes)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= (static_cast<uint32_t>(lanes[i]) & 1) << i;
  return bits;
#endif
}

VecWord factors_of(VecWord bins) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecWord>(_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), kAllLanes,
                                                               reinterpret_cast<__m512i>(bins), kBinFactors.of, 4));
#elif defined(__AVX2__)
  return reinterpret_cast<VecWord>(
      _mm256_i32gather_epi32(reinterpret_cast<const int*>(kBinFactors.of), reinterpret_cast<__m256i>(bins), 4));
#else
  VecWord factors;
  for (int i = 0; i < kLanes; ++i) factors[i] = kBinFactors.of[bins[i]];
  return factors;
#endif
}

// The products of the lower halves of each 64 bits.
VecLong low_products(VecLong a, VecLong b) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecLong>(_mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<VecLong>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return (a & UINT32_MAX) * (b & UINT32_MAX);
#endif
}

// Of the lower halves of each 64 bits, the upper half of the product.
VecLong high_products(VecLong a, VecLong b) { return low_products(a, b) >> 32; }

// fixed_below of each lane.
VecWord fixed_lanes(Vec below) {
  const Vec scaled = below * 0x1p27f;
#if defined(__AVX512F__)
  return __builtin_convertvector(scaled, VecWord);
#else
  const VecInt large = scaled >= 0x1p31f;  // multiples of 128
  const Vec beyond = reinterpret_cast<Vec>(reinterpret_cast<VecInt>(splat(0x1p31f)) & large);
  return reinterpret_cast<VecWord>(__builtin_convertvector(scaled - beyond, VecInt) ^ (large & INT32_MIN));
#endif
}

// Shares of what the lower halves of each 64 bits hold; a factor of 0 gives none.
VecLong shares_of(VecLong fixed, VecLong factors) {
  const VecLong rest = fixed << 11;
  const VecLong numbers = factors & (UINT32_MAX & ~0xffu);
  const VecLong square = high_products(rest, kSquare - VecLong{});
  const VecLong bits = (numbers - high_products(numbers, high_products(rest, kLinear - square))) >> 8;
  return bits << kPlainBits >> (factors & 0xff);
}

// The sums over pairs of lanes of share_below.
VecLong shares_below(Vec below) {
  const VecInt counts = below < kNoShareBelow;
  const VecWord fixed = fixed_lanes(reinterpret_cast<Vec>(reinterpret_cast<VecInt>(below) & counts));
  const VecLong factors = reinterpret_cast<VecLong>(factors_of(fixed >> 21) & reinterpret_cast<VecWord>(counts));
  const VecLong both = reinterpret_cast<VecLong>(fixed);
  return shares_of(both, factors) + shares_of(both >> 32, factors >> 32);
}

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

uint64_t total_share(const float* scores, int32_t count, float most) {
  VecLong sums = {};
  int32_t token = 0;
  for (; token + kLanes <= count; token += kLanes) sums += shares_below(most - load(scores + token));
  uint64_t total = 0;
  for (int i = 0; i < kLanes / 2; ++i) total += sums[i];
  for (; token < count; ++token) total += share_below(most - scores[token]);
  return total;
}

// Writes the tokens whose scores are less than `reach`, and not less than `before`, below `most`, and gives their number.
// `tokens` has room for kLanes more than there are.
int32_t find_near(const float* scores, int32_t count, float most, float before, float reach, int32_t* tokens) {
  int32_t found = 0;
  int32_t token = 0;
#if defined(__AVX512F__)
  __m512i own = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (; token + kLanes <= count; token += kLanes) {
    const Vec below = most - load(scores + token);
    const __mmask16 less = _mm512_cmp_ps_mask(below, splat(reach), _CMP_LT_OQ);
    const __mmask16 near = _mm512_mask_cmp_ps_mask(less, below, splat(before), _CMP_GE_OQ);
    _mm512_storeu_si512(tokens + found, _mm512_maskz_compress_epi32(near, own));
    found += __builtin_popcount(near);
    own = reinterpret_cast<__m512i>(reinterpret_cast<VecInt>(own) + kLanes);
  }
#else
  for (; token + kLanes <= count; token += kLanes) {
    const Vec below = most - load(scores + token);
    for (uint32_t bits = bits_of((below < reach) & (below >= before)); bits != 0; bits &= bits - 1) {
      tokens[found++] = token + __builtin_ctz(bits);
    }
  }
#endif
  for (; token < count; ++token) {
    const float below = most - scores[token];
    if (below < reach && below >= before) tokens[found++] = token;
  }
  return found;
}

// Memory of a worker that chooses.
struct ChoiceRoom {
  uint64_t* sums;         // kShareBins
  Candidate* candidates;  // of all tokens
  int32_t* near;          // of all tokens, and kLanes more

  static size_t bytes(const SelectByMassArguments& a) {
    const auto tokens = static_cast<size_t>(a.score_tokens);
    return kShareBins * sizeof(uint64_t) + tokens * (sizeof(Candidate) + sizeof(int32_t)) + kLanes * sizeof(int32_t);
  }
  ChoiceRoom(const SelectByMassArguments& a, void* memory)
      : sums(static_cast<uint64_t*>(memory)),
        candidates(reinterpret_cast<Candidate*>(sums + kShareBins)),
        near(reinterpret_cast<int32_t*>(candidates + a.score_tokens)) {}
};

HeadChoice choose(const SelectByMassArguments& a, int64_t row_head, int32_t count, const ChoiceRoom& room) {
  const float* scores = a.scores + row_head * a.score_tokens;
  const float dense = a.dense_log_sum_exp == nullptr ? -__builtin_inff() : a.dense_log_sum_exp[row_head];
  const float most = a.ranges == nullptr ? largest(scores, count) : largest(a.ranges + row_head * a.range_parts * 2, a.range_parts, count);
  HeadChoice choice{{most, 0}, kTakesNone, 0};
  HeadSum& sum = choice.sum;
  if (!(dense < __builtin_inff())) sum.most = __builtin_nanf("");
  if (!sum.is_sound() || sum.most == -__builtin_inff()) return choice;

  sum.total = total_share(scores, count, sum.most);
  choice.log_of_all = log_of_all(sum, dense);
  uint64_t wanted = wanted_share(sum, dense, a.tau);
  if (wanted == 0) return choice;
  // The best tokens first, and more only if they have too little share.
  std::memset(room.sums, 0, kShareBins * sizeof(uint64_t));
  int cut_bin = 0;
  for (int reach = 4;; reach += 2) {
    const int before = reach == 4 ? 0 : reach - 2;
    const int32_t found = find_near(scores, count, sum.most, static_cast<float>(before), static_cast<float>(reach), room.near);
    for (int32_t i = 0; i < found; ++i) {
      const uint32_t fixed = fixed_below(sum.most - scores[room.near[i]]);
      const uint32_t factor = kBinFactors.of[bin_of(fixed)];
      room.sums[bin_of(fixed)] += share(share_bits(fixed, factor), factor & 0xff);
    }
    while (cut_bin < reach * kUnitBins && room.sums[cut_bin] < wanted) wanted -= room.sums[cut_bin++];
    if (cut_bin < reach * kUnitBins) break;
  }
  constexpr float kBin = 1.0f / kUnitBins;
  const auto first = static_cast<float>(cut_bin);
  const int32_t found = find_near(scores, count, sum.most, first * kBin, (first + 1) * kBin, room.near);
  for (int32_t i = 0; i < found; ++i) {
    const int32_t token = room.near[i];
    room.candidates[i] = {share_below(sum.most - scores[token]), score_order(scores[token]), token};
  }
  choice.cut = find_cut(room.candidates, found, wanted);
  return choice;
}

// A bit for each token.
constexpr int64_t mark_words(const SelectByMassArguments& a) { return (int64_t{a.score_tokens} + 31) / 32; }

// Marks what a head takes.
void mark(const float* scores, int32_t count, const Cut& cut, uint32_t* marks) {
  // A head takes what has a greater score. It is NaN for a head that takes none.
  const uint32_t bits = bits_of_order(cut.order);
  float cut_score;
  std::memcpy(&cut_score, &bits, sizeof cut_score);
  for (int32_t first = 0; first < count; first += 32) {
    uint32_t taken = 0;
    for (int32_t i = 0; i < 32 && first + i < count; i += kLanes) {
      const int32_t token = first + i;
      uint32_t may = (1u << (count - token < kLanes ? count - token : kLanes)) - 1;
      if (token + kLanes <= count) {
        const Vec own = load(scores + token);
        taken |= bits_of(own > cut_score) << i;
        may = bits_of(own == cut_score);
      }
      for (; may != 0; may &= may - 1) {
        const int32_t lane = __builtin_ctz(may);
        taken |= static_cast<uint32_t>(cut.takes(score_order(scores[token + lane]), token + lane)) << (i + lane);
      }
    }
    marks[first / 32] = taken;
  }
}

// The list of a row and kv head.
class List {
 public:
  // `marks` are of all heads, and `union_marks` of all lists.
  List(const SelectByMassArguments& a, const HeadChoice* choices, const uint32_t* marks, uint32_t* union_marks, int64_t row,
       int32_t kv_head, int32_t slot)
      : a_(a),
        index_(row * a.kv_heads + kv_head),
        choices_(choices + index_ * a.group()),
        scores_(a.scores + index_ * a.group() * a.score_tokens),
        head_marks_(marks + index_ * a.group() * mark_words(a)),
        marks_(union_marks + index_ * mark_words(a)),
        cache_head_(int64_t{slot} * a.kv_heads + kv_head) {}

  // Unmarks what there is no room for, and writes the rows of the rest. `candidates` has room for all tokens.
  void write_rows(int32_t tokens, Candidate* candidates) const {
    int32_t count = 0;
    for (int32_t word = 0; word * 32 < tokens; ++word) {
      uint32_t all = 0;
      for (int32_t head = 0; head < a_.group(); ++head) all |= head_marks_[head * mark_words(a_) + word];
      marks_[word] = all;
      count += __builtin_popcount(all);
    }
    if (count > a_.most_tokens()) count = keep_best(tokens, candidates);
    int32_t* rows = a_.value_rows + index_ * a_.capacity;
    for_each_marked(tokens, [&](int32_t token) {
      const int32_t block = a_.block_table[cache_head_ * a_.table_width + token / kValueBlockTokens];
      *rows++ = block * kValueBlockTokens + token % kValueBlockTokens;
    });
    const int32_t mean = mean_row(count);
    if (mean >= 0) *rows = mean;
    a_.counts[index_] = mean >= 0 ? count + 1 : count;
  }

  // The weights of a head, and what they were divided by.
  void write_weights(int32_t tokens, int32_t head) const {
    const int64_t first = index_ * a_.capacity;
    const auto weight_at = [&](int32_t i) -> float& { return a_.weights[(first + i) * a_.group() + head]; };
    uint64_t taken = 0;
    int32_t count = 0;
    for_each_marked(tokens, [&](int32_t token) {
      const uint64_t own = takes(head, token) ? share_below(choices_[head].sum.most - score(head, token)) : 0;
      taken += own;
      if (a_.weights != nullptr) weight_at(count) = static_cast<float>(own);
      ++count;
    });
    const HeadWeights made = weights_of(choices_[head].sum, taken, a_.missing);
    a_.log_sum_exp[index_ * a_.group() + head] = made.log_sum_exp;
    if (a_.weights == nullptr) return;
    for (int32_t i = 0; i < count; ++i) weight_at(i) = weight_at(i) / static_cast<float>(made.sum) * scale(a_.value_rows[first + i]);
    const int32_t mean = mean_row(count);
    if (mean >= 0) weight_at(count) = made.missing * scale(mean);
  }

 private:
  float score(int32_t head, int32_t token) const { return scores_[int64_t{head} * a_.score_tokens + token]; }
  bool takes(int32_t head, int32_t token) const {
    return head_marks_[head * mark_words(a_) + token / 32] >> token % 32 & 1;
  }

  template <class Body>
  void for_each_marked(int32_t tokens, Body&& body) const {
    for (int32_t word = 0; word * 32 < tokens; ++word) {
      for (uint32_t left = marks_[word]; left != 0; left &= left - 1) body(word * 32 + __builtin_ctz(left));
    }
  }

  // Leaves the marks of the largest shares that there is room for.
  int32_t keep_best(int32_t tokens, Candidate* candidates) const {
    int32_t count = 0;
    for_each_marked(tokens, [&](int32_t token) {
      Candidate& candidate = candidates[count++] = {1, 0, token};
      for (int32_t head = 0; head < a_.group(); ++head) {
        if (!takes(head, token)) continue;
        const uint32_t order = score_order(score(head, token) - choices_[head].log_of_all);
        candidate.order = order > candidate.order ? order : candidate.order;
      }
    });
    const auto room = static_cast<uint64_t>(a_.most_tokens());
    const Cut cut = room == 0 ? kTakesNone : find_cut(candidates, count, room);
    int32_t kept = 0;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t token = candidates[i].token;
      if (cut.takes(candidates[i].order, token)) ++kept;
      else marks_[token / 32] &= ~(1u << token % 32);
    }
    return kept;
  }

  // -1 if there is none.
  int32_t mean_row(int32_t count) const {
    return a_.missing == MissingMass::mean_value && count > 0 ? a_.mean_rows[cache_head_] : -1;
  }

  float scale(int32_t value_row) const { return a_.value_scales == nullptr ? 1 : bfloat_to_float(a_.value_scales[value_row]); }

  const SelectByMassArguments& a_;
  int64_t index_;
  const HeadChoice* choices_;
  const float* scores_;
  const uint32_t* head_marks_;
  uint32_t* marks_;
  int64_t cache_head_;
};

}  // namespace

void select_by_mass(const SelectByMassArguments& a, Workers& workers) {
  const size_t rows = static_cast<size_t>(a.query_tokens);
  const size_t heads = static_cast<size_t>(a.query_heads);
  const size_t kv_heads = static_cast<size_t>(a.kv_heads);
  const size_t lists = rows * kv_heads;
  const size_t choice_bytes = rows * heads * sizeof(HeadChoice);
  const auto words = static_cast<size_t>(mark_words(a));
  const size_t mark_bytes = (rows * heads + lists) * words * sizeof(uint32_t);
  auto* choices = static_cast<HeadChoice*>(workers.shared_scratch(choice_bytes + rows * sizeof(RowSlot) + mark_bytes));
  auto* slots = reinterpret_cast<RowSlot*>(choices + rows * heads);
  auto* marks = reinterpret_cast<uint32_t*>(slots + rows);
  uint32_t* union_marks = marks + rows * heads * words;
  for (size_t row = 0; row < rows; ++row) slots[row] = {-1};
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    for (int32_t row = a.query_start[entry]; row < a.query_start[entry + 1]; ++row) slots[row] = {a.slots[entry]};
  }
  const size_t candidate_bytes = static_cast<size_t>(a.score_tokens) * sizeof(Candidate);
  workers.for_each(rows * heads, [&](size_t index, int worker) {
    const ChoiceRoom room(a, workers.scratch(worker, ChoiceRoom::bytes(a)));
    const auto kv_head = static_cast<int32_t>(index % heads) / a.group();
    const int32_t tokens = slots[index / heads].tokens(a, kv_head);
    choices[index] = choose(a, static_cast<int64_t>(index), tokens, room);
    mark(a.scores + static_cast<int64_t>(index) * a.score_tokens, tokens, choices[index].cut, marks + index * words);
  });
  // Calls body(list, its tokens).
  const auto with_list = [&](size_t index, auto&& body) {
    const RowSlot slot = slots[index / kv_heads];
    const auto kv_head = static_cast<int32_t>(index % kv_heads);
    body(List(a, choices, marks, union_marks, static_cast<int64_t>(index / kv_heads), kv_head, slot.slot), slot.tokens(a, kv_head));
  };
  workers.for_each(lists, [&](size_t index, int worker) {
    auto* candidates = static_cast<Candidate*>(workers.scratch(worker, candidate_bytes));
    with_list(index, [&](const List& list, int32_t tokens) { list.write_rows(tokens, candidates); });
  });
  const size_t group = heads / kv_heads;
  workers.for_each(rows * heads, [&](size_t index, int) {
    with_list(index / group, [&](const List& list, int32_t tokens) { list.write_weights(tokens, static_cast<int32_t>(index % group)); });
  });
}

}  // namespace KV_ISA
}  // namespace kv
