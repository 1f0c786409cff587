#include "kernels/select-by-mass/select-by-mass.h"

#include "kernels/select-by-mass/select-by-mass-shares.h"
#include "runtime/workers.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr BinFactors kBinFactors;

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
VecLong low_products(VecWord a, VecWord b) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecLong>(_mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<VecLong>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return (reinterpret_cast<VecLong>(a) & UINT32_MAX) * (reinterpret_cast<VecLong>(b) & UINT32_MAX);
#endif
}

VecWord high_lanes(VecWord a) { return reinterpret_cast<VecWord>(reinterpret_cast<VecLong>(a) >> 32); }

VecWord high_products(VecWord a, VecWord b) {
  const VecLong odd = low_products(high_lanes(a), high_lanes(b)) & ~uint64_t{UINT32_MAX};
  return reinterpret_cast<VecWord>(low_products(a, b) >> 32 | odd);
}

// share_bits of each lane.
VecWord bits_of_shares(VecWord fixed, VecWord factors) {
  const VecWord rest = fixed << 11;
  const VecWord numbers = factors & ~0xffu;
  const VecWord square = high_products(rest, kSquare - VecWord{});
  return (numbers - high_products(numbers, high_products(rest, kLinear - square))) >> 8;
}

// fixed_below of each lane.
VecWord fixed_lanes(Vec below) {
  const Vec scaled = below * 0x1p27f;
  const VecInt large = scaled >= 0x1p31f;  // multiples of 128
  const Vec beyond = reinterpret_cast<Vec>(reinterpret_cast<VecInt>(splat(0x1p31f)) & large);
  return reinterpret_cast<VecWord>(__builtin_convertvector(scaled - beyond, VecInt) ^ (large & INT32_MIN));
}

// The sums over pairs of lanes of share_below.
VecLong shares_below(Vec below) {
  const VecInt counts = below < kNoShareBelow;
  const VecWord fixed = fixed_lanes(reinterpret_cast<Vec>(reinterpret_cast<VecInt>(below) & counts));
  const VecWord factors = factors_of(fixed >> 21);
  const VecWord octaves = factors & 0xff;
  const VecWord bits = bits_of_shares(fixed, factors) & reinterpret_cast<VecWord>(counts);
  const auto even = [](VecWord v) { return reinterpret_cast<VecLong>(v) & UINT32_MAX; };
  const auto odd = [](VecWord v) { return reinterpret_cast<VecLong>(v) >> 32; };
  return (even(bits) << kPlainBits >> even(octaves)) + (odd(bits) << kPlainBits >> odd(octaves));
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

uint64_t total_share(const float* scores, int32_t count, float most) {
  VecLong sums = {};
  int32_t token = 0;
  for (; token + kLanes <= count; token += kLanes) sums += shares_below(most - load(scores + token));
  uint64_t total = 0;
  for (int i = 0; i < kLanes / 2; ++i) total += sums[i];
  for (; token < count; ++token) total += share_below(most - scores[token]);
  return total;
}

// Calls body(token, below) for the tokens whose scores are less than `reach`, and not less than `before`, below `most`.
template <class Body>
void collect(const float* scores, int32_t count, float most, float before, float reach, Body&& body) {
  int32_t token = 0;
  for (; token + kLanes <= count; token += kLanes) {
    const Vec below = most - load(scores + token);
    for (uint32_t bits = bits_of((below < reach) & (below >= before)); bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      body(token + lane, most - scores[token + lane]);
    }
  }
  for (; token < count; ++token) {
    const float below = most - scores[token];
    if (below < reach && below >= before) body(token, below);
  }
}

// `sums` has kShareBins, and `candidates` room for all tokens.
HeadChoice choose(const SelectByMassArguments& a, int64_t row_head, int32_t count, uint64_t* sums, Candidate* candidates) {
  const float* scores = a.scores + row_head * a.score_tokens;
  const float dense = a.dense_log_sum_exp == nullptr ? -__builtin_inff() : a.dense_log_sum_exp[row_head];
  HeadChoice choice{{largest(scores, count), 0}, kTakesNone, 0};
  HeadSum& sum = choice.sum;
  if (!(dense < __builtin_inff())) sum.most = __builtin_nanf("");
  if (!sum.is_sound() || sum.most == -__builtin_inff()) return choice;

  sum.total = total_share(scores, count, sum.most);
  choice.log_of_all = log_of_all(sum, dense);
  uint64_t wanted = wanted_share(sum, dense, a.tau);
  if (wanted == 0) return choice;
  // Of the best tokens first, and of more only if they have too little share.
  std::memset(sums, 0, kShareBins * sizeof(uint64_t));
  int32_t found = 0;
  int cut_bin = 0;
  for (float reach = 4, before = 0; wanted > 0; before = reach, reach = 2 * reach < kNoShareBelow ? 2 * reach : kNoShareBelow) {
    found = 0;
    collect(scores, count, sum.most, before, reach, [&](int32_t token, float below) {
      const uint64_t own = share_below(below);
      sums[bin_of(fixed_below(below))] += own;
      candidates[found++] = {own, score_order(scores[token]), token};
    });
    const int end = static_cast<int>(reach) * (kShareBins / static_cast<int>(kNoShareBelow));
    while (cut_bin < end && sums[cut_bin] < wanted) wanted -= sums[cut_bin++];
    if (cut_bin < end) break;
  }
  int32_t in_bin = 0;
  for (int32_t i = 0; i < found; ++i) {
    if (bin_of(fixed_below(sum.most - scores[candidates[i].token])) == cut_bin) candidates[in_bin++] = candidates[i];
  }
  choice.cut = find_cut(candidates, in_bin, wanted);
  return choice;
}

// The list of a row and kv head.
class List {
 public:
  List(const SelectByMassArguments& a, const HeadChoice* choices, int64_t row, int32_t kv_head, int32_t slot)
      : a_(a),
        choices_(choices + row * a.query_heads + kv_head * a.group()),
        scores_(a.scores + (row * a.query_heads + kv_head * a.group()) * a.score_tokens),
        index_(row * a.kv_heads + kv_head),
        cache_head_(int64_t{slot} * a.kv_heads + kv_head) {}

  // `candidates` has room for all tokens.
  void write(int32_t tokens, Candidate* candidates) const {
    int32_t count = 0;
    const auto add = [&](int32_t token) {
      bool taken = false;
      for (int32_t head = 0; head < a_.group(); ++head) taken = taken || takes(head, token);
      if (taken) candidates[count++] = {1, 0, token};
    };
    int32_t token = 0;
    for (; token + kLanes <= tokens; token += kLanes) {
      for (uint32_t bits = bits_of(may_take(token)); bits != 0; bits &= bits - 1) add(token + __builtin_ctz(bits));
    }
    for (; token < tokens; ++token) add(token);
    if (count > a_.most_tokens()) count = keep_best(candidates, count);
    const int64_t first = index_ * a_.capacity;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t token = candidates[i].token;
      const int32_t block = a_.block_table[cache_head_ * a_.table_width + token / kValueBlockTokens];
      a_.value_rows[first + i] = block * kValueBlockTokens + token % kValueBlockTokens;
    }
    const int32_t mean = a_.missing == MissingMass::mean_value && count > 0 ? a_.mean_rows[cache_head_] : -1;
    if (mean >= 0) a_.value_rows[first + count] = mean;
    for (int32_t head = 0; head < a_.group(); ++head) write_weights(head, candidates, count, mean >= 0);
    a_.counts[index_] = mean >= 0 ? count + 1 : count;
  }

 private:
  float score(int32_t head, int32_t token) const { return scores_[int64_t{head} * a_.score_tokens + token]; }
  bool takes(int32_t head, int32_t token) const {
    return choices_[head].cut.takes(score_order(score(head, token)), token);
  }

  // Which of kLanes tokens have scores that a head takes, at least of lower indices. Of no head that takes none: its cut is
  // the order of a NaN.
  VecInt may_take(int32_t token) const {
    VecInt may = {};
    for (int32_t head = 0; head < a_.group(); ++head) {
      float cut;
      const uint32_t bits = bits_of_order(choices_[head].cut.order);
      std::memcpy(&cut, &bits, sizeof cut);
      may |= load(scores_ + int64_t{head} * a_.score_tokens + token) >= cut;
    }
    return may;
  }

  // Leaves the candidates of the largest shares that there is room for.
  int32_t keep_best(Candidate* candidates, int32_t count) const {
    for (int32_t i = 0; i < count; ++i) {
      const int32_t token = candidates[i].token;
      for (int32_t head = 0; head < a_.group(); ++head) {
        if (!takes(head, token)) continue;
        const uint32_t order = score_order(score(head, token) - choices_[head].log_of_all);
        candidates[i].order = order > candidates[i].order ? order : candidates[i].order;
      }
    }
    const auto room = static_cast<uint64_t>(a_.most_tokens());
    const Cut cut = room == 0 ? kTakesNone : find_cut(candidates, count, room);
    int32_t kept = 0;
    for (int32_t i = 0; i < count; ++i) {
      if (cut.takes(candidates[i].order, candidates[i].token)) candidates[kept++] = candidates[i];
    }
    return kept;
  }

  uint64_t share(int32_t head, int32_t token) const {
    return takes(head, token) ? share_below(choices_[head].sum.most - score(head, token)) : 0;
  }

  // And what they were divided by.
  void write_weights(int32_t head, const Candidate* candidates, int32_t count, bool with_mean) const {
    const int64_t first = index_ * a_.capacity;
    const auto weight_at = [&](int32_t i) -> float& { return a_.weights[(first + i) * a_.group() + head]; };
    uint64_t taken = 0;
    for (int32_t i = 0; i < count; ++i) {
      const uint64_t own = share(head, candidates[i].token);
      taken += own;
      if (a_.weights != nullptr) weight_at(i) = static_cast<float>(own);
    }
    const HeadWeights made = weights_of(choices_[head].sum, taken, a_.missing);
    if (a_.weights != nullptr) {
      for (int32_t i = 0; i < count; ++i) weight_at(i) = weight_at(i) / static_cast<float>(made.sum) * scale(a_.value_rows[first + i]);
      if (with_mean) weight_at(count) = made.missing * scale(a_.value_rows[first + count]);
    }
    a_.log_sum_exp[index_ * a_.group() + head] = made.log_sum_exp;
  }

  float scale(int32_t value_row) const { return a_.value_scales == nullptr ? 1 : bfloat_to_float(a_.value_scales[value_row]); }

  const SelectByMassArguments& a_;
  const HeadChoice* choices_;
  const float* scores_;
  int64_t index_;
  int64_t cache_head_;
};

}  // namespace

void select_by_mass(const SelectByMassArguments& a, Workers& workers) {
  const size_t rows = static_cast<size_t>(a.query_tokens);
  const size_t heads = static_cast<size_t>(a.query_heads);
  const size_t kv_heads = static_cast<size_t>(a.kv_heads);
  auto* choices = static_cast<HeadChoice*>(workers.shared_scratch(rows * (heads * sizeof(HeadChoice) + sizeof(RowSlot))));
  auto* slots = reinterpret_cast<RowSlot*>(choices + rows * heads);
  for (size_t row = 0; row < rows; ++row) slots[row] = {-1};
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    for (int32_t row = a.query_start[entry]; row < a.query_start[entry + 1]; ++row) slots[row] = {a.slots[entry]};
  }
  const size_t candidate_bytes = static_cast<size_t>(a.score_tokens) * sizeof(Candidate);
  workers.for_each(rows * heads, [&](size_t index, int worker) {
    auto* sums = static_cast<uint64_t*>(workers.scratch(worker, kShareBins * sizeof(uint64_t) + candidate_bytes));
    const auto kv_head = static_cast<int32_t>(index % heads) / a.group();
    const int32_t tokens = slots[index / heads].tokens(a, kv_head);
    choices[index] = choose(a, static_cast<int64_t>(index), tokens, sums, reinterpret_cast<Candidate*>(sums + kShareBins));
  });
  workers.for_each(rows * kv_heads, [&](size_t index, int worker) {
    const auto row = static_cast<int64_t>(index / kv_heads);
    const auto kv_head = static_cast<int32_t>(index % kv_heads);
    auto* candidates = static_cast<Candidate*>(workers.scratch(worker, candidate_bytes));
    List(a, choices, row, kv_head, slots[row].slot).write(slots[row].tokens(a, kv_head), candidates);
  });
}

}  // namespace KV_ISA
}  // namespace kv
