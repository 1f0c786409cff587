// The product for few rows of input, bound by reading the weights: each is read once, and widened once for a group of
// input rows. Lanes run along the input features, so the weights need no packing. They pass in memory order, unless the
// rows of input are wide: then a part of these stays in the first cache while a block of weights passes.
#pragma once

#include "kernels/linear/linear-rows.cpu.h"
#include "runtime/first-cache.h"
#include "runtime/workers.h"

namespace kv {
namespace KV_ISA {
namespace {

// Input rows in registers at once, and running sums of each: an FMA takes several issues to finish.
// A row's terms are added in the same order in a group of any size.
constexpr int kGroupRows = kLanes == 16 ? 8 : 4;
constexpr int kChains = 2;
static_assert(kMostMemoryStreams == 4, "dot_rows_together has a case for each number of weight rows");
// Weights are asked for this far ahead of their use, which is further than hardware looks: in the first cache, without a
// place in the second, so that the input keeps its place. Or first in the second cache, where more can be on their way. A core
// that drops requests is asked several times, for the second cache alone.
constexpr int64_t kAhead = 7 << 10;
constexpr int64_t kAheadOfFirst = 2 << 10;
constexpr int64_t kAheadOfSecond = 16 << 10;
constexpr int kNoReuse = 0;
constexpr int kSecondCache = 2;
constexpr int64_t kMostChunkOuts = 256;
constexpr int64_t kChunksPerWorker = 16;
// One row of input may leave the first cache between two rows of weights. So more of these share it where there are
// registers for their sums, and what is asked for ahead is shared among them. Several rows that together are as long are
// multiplied in parts. The sums of a block of rows of weights wait in memory meanwhile.
constexpr int kSharingRows = kLanes == 16 ? 8 : 1;
constexpr int64_t kBlockSums = 512;
// Several rows of input read so many bytes of weights, or one row of them, one behind the other. Parts are asked for this far
// ahead.
constexpr int64_t kRunBytes = 4 << 10;
constexpr int64_t kAheadOfParts = 12 << 10;

// How many floats of the input stay in the first cache while weights pass through the rest of it.
inline int64_t most_few_floats() { return first_cache_bytes() * 2 / 3 / 4096 * 1024; }

// How far ahead of a line more is asked for: for the second cache, and for the first without reuse.
struct Asked {
  int64_t second, no_reuse;
};

// `requests`: how often a line is asked for in the second cache. None: in the first one alone.
template <int requests>
__attribute__((always_inline)) inline void fetch(const char* line, const Asked& asked) {
#pragma GCC unroll 8
  for (int i = 0; i < requests; ++i) __builtin_prefetch(line + asked.second, 0, kSecondCache);
  if (requests < 2) __builtin_prefetch(line + asked.no_reuse, 0, kNoReuse);
}

// For `together` rows, `bytes` in front of the last one that this thread reads. What lies behind is another's: a line on its way
// to one core comes late to the core that reads it. All rows that are read at once are together as far ahead as the constants say.
template <int requests>
inline Asked asked_for(int64_t bytes, int64_t row_bytes, int64_t together) {
  const int64_t streams = together > kMostMemoryStreams ? together : 1;
  const auto within = [&](int64_t ahead) { return row_bytes * together / 2 + ahead / streams < bytes ? ahead / streams : 0; };
  return {requests > 0 ? within(kAheadOfSecond) : 0, within(requests > 0 ? kAheadOfFirst : kAhead)};
}

// Some features of some rows of weights. Unless these features are the first, products are added to
// sums[out][row][chain][lane], and unless they are the last, that is where they stay.
struct Part {
  int64_t outs, features;
  bool first, last;
  float* sums;
};

// dots[row][out] = the scalar product of each of a packed group of input rows with each row of weights, of which `outs` are read
// at once. Each is a stream of memory. How many a core should fetch at once depends on the processor.
template <int rows, int outs, int requests, class W>
void dot_rows(const float* group, const W* weight, int64_t weight_stride, const Part& part, float* dots, int64_t dots_stride,
              const Asked& asked) {
  // One row may be what is left of several that are multiplied in parts.
  constexpr bool parted = outs == 1;
  float* sums = part.sums;
  for (int64_t left = part.outs; left > 0; left -= outs, weight += outs * weight_stride, dots += outs) {
    Vec total[outs][rows][kChains] = {};
    if (parted && !part.first) {
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        for (int chain = 0; chain < kChains; ++chain) total[0][i][chain] = load(sums + (i * kChains + chain) * kLanes);
      }
    }
    int64_t k = 0;
    for (; k + kChains * kLanes <= part.features; k += kChains * kLanes) {
      for (int out = 0; out < outs; ++out) {
        const W* row = weight + out * weight_stride + k;
        for (size_t byte = 0; byte < kChains * kLanes * sizeof(W); byte += 64) {
          fetch<requests>(reinterpret_cast<const char*>(row) + byte, asked);
        }
        for (int chain = 0; chain < kChains; ++chain) {
          const Vec w = load(row + chain * kLanes);
          const float* inputs = group + (k + chain * kLanes) * rows;
          for (int i = 0; i < rows; ++i) total[out][i][chain] += load(inputs + i * kLanes) * w;
        }
      }
    }
    for (; k < part.features; k += kLanes) {
      for (int out = 0; out < outs; ++out) {
        const Vec w = load_up_to(weight + out * weight_stride + k, part.features - k);
        for (int i = 0; i < rows; ++i) total[out][i][0] += load(group + k * rows + i * kLanes) * w;
      }
    }
    if (parted && !part.last) {
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        for (int chain = 0; chain < kChains; ++chain) store(sums + (i * kChains + chain) * kLanes, total[0][i][chain]);
      }
    } else {
#pragma GCC unroll 8
      for (int out = 0; out < outs; ++out) {
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i) dots[i * dots_stride + out] = horizontal_sum(total[out][i][0] + total[out][i][1]);
      }
    }
    sums += rows * kChains * kLanes;
  }
}

template <int rows, int outs, int requests, class W>
inline auto dot_rows_of(int64_t count) {
  if constexpr (rows == 1) {
    return dot_rows<1, outs, requests, W>;
  } else {
    return count == rows ? dot_rows<rows, outs, requests, W> : dot_rows_of<rows - 1, outs, requests, W>(count);
  }
}

// How many weight rows are read at once.
int64_t most_together(const LinearArguments& a, const MemoryReading& reading) {
  if (a.tokens > 1) return 1;
  return kSharingRows > 1 && reading.requests == 1 && a.in_features > most_few_floats() ? kSharingRows : reading.streams;
}

// dot_rows for up to kGroupRows input rows, or for one and as many weight rows as most_together says, or fewer.
template <int requests, class W>
auto dot_rows_together(int64_t rows, int64_t together) {
  if constexpr (kSharingRows == 8 && requests < kMostRequests) {
    if (together == 8) return dot_rows<1, 8, requests, W>;
  }
  if constexpr (requests == 0) {
    if (together == 4) return dot_rows<1, 4, requests, W>;
    if (together == 2) return dot_rows<1, 2, requests, W>;
  }
  return dot_rows_of<requests == kMostRequests ? 1 : kGroupRows, 1, requests, W>(rows);
}

// The input rows of a call, packed in groups.
struct PackedGroups {
  const float* groups;
  int64_t padded;
};

// How many features of the input stay in the first cache while weights pass through it.
inline int64_t part_features(const LinearArguments& a) {
  if (a.tokens == 1 || a.tokens * a.in_features <= most_few_floats()) return a.in_features > 0 ? a.in_features : 1;
  return most_few_floats() / round_up(a.tokens, 8);
}

// Multiplies `outs` outputs of a layer, from `begin` on; the worker reads the weights of all outputs before `end`. It goes over
// blocks of outputs, in these over parts of the features, and in these over runs of outputs.
template <int requests, class W>
void multiply_outs(const LinearArguments& a, const PackedGroups& packed, int64_t together, int64_t begin, int64_t outs,
                   int64_t end, float* dots, int64_t dots_stride) {
  constexpr int64_t kBytes = sizeof(W);
  const W* weight = static_cast<const W*>(a.weight) + begin * a.weight_stride;
  const int64_t row_bytes = a.weight_stride * kBytes, part = part_features(a);
  const int64_t most_run = a.tokens == 1 || part * kBytes >= kRunBytes ? together : kRunBytes / (part * kBytes);
  // One row of input: all rows of weights behind which as much is left as is asked for ahead. To begin a run takes a sixth of the
  // time of a row of 768 features.
  const auto longest_run = [&](int64_t left) {
    const int64_t rows = left - (row_bytes > 0 ? kAheadOfSecond / row_bytes : 0) - together;
    return rows > together ? rows / together * together : together;
  };
  const auto in_runs = [&](int64_t bytes) { return divide_up(bytes, part * kBytes * most_run) * most_run; };
  const int64_t ahead = requests > 0 ? most_run : in_runs(kAheadOfParts), second_ahead = in_runs(kAheadOfSecond);
  alignas(64) float sums[kBlockSums * kChains * kLanes];
  for (int64_t block, out = 0; out < outs; out += block) {
    block = smaller(kBlockSums / a.tokens, outs - out);
    int64_t k = 0;
    do {
      // How many bytes ahead the part of a row lies that is read so many rows later.
      const auto later = [&](int64_t each, int64_t rows) {
        rows = smaller(rows, block);
        if (each + rows < block) return rows * row_bytes;
        if (k + part < a.in_features) return (rows - block) * row_bytes + part * kBytes;
        return out + each + rows < end - begin ? rows * row_bytes - k * kBytes : 0;
      };
      for (int64_t run, each = 0; each < block; each += run) {
        while (each + together > block) together = requests == 0 ? together / 2 : 1;
        const int64_t wanted = a.tokens == 1 ? longest_run(end - begin - out - each) : most_run;
        run = smaller(wanted, (block - each) / together * together);
        const Asked asked = part >= a.in_features
                                ? asked_for<requests>((end - begin - out - each - run + together) * row_bytes, row_bytes, together)
                                : Asked{requests > 0 ? later(each, second_ahead) : 0, later(each, ahead)};
        for (int64_t row = 0; row < a.tokens; row += kGroupRows) {
          const int64_t rows = smaller(a.tokens - row, kGroupRows);
          const Part of_run = {run, smaller(part, a.in_features - k), k == 0, k + part >= a.in_features,
                               sums + (row * block + each * rows) * kChains * kLanes};
          dot_rows_together<requests, W>(rows, together)(packed.groups + row * packed.padded + k * rows,
                                                         weight + (out + each) * a.weight_stride + k, a.weight_stride, of_run,
                                                         dots + row * dots_stride + out + each, dots_stride, asked);
        }
      }
      k += part;
    } while (k < a.in_features);
  }
}

void multiply_chunk(const LinearArguments& a, const PackedGroups& packed, const MemoryReading& reading, int64_t begin,
                    int64_t outs, int64_t end) {
  float sums[kMostFewRows * kMostChunkOuts];
  with_float_type(a.weight_dtype, [&](auto element) {
    using W = decltype(element);
    const bool once = reading.requests == 1 || a.tokens > 1;
    const auto multiply = reading.cache == 1 ? multiply_outs<0, W> : once ? multiply_outs<1, W> : multiply_outs<kMostRequests, W>;
    multiply(a, packed, most_together(a, reading), begin, outs, end, sums, outs);
  });
  float bias[kMostChunkOuts];
  read_bias(a, begin, outs, bias);
  with_float_type(a.dtype, [&](auto element) {
    for (int64_t row = 0; row < a.tokens; ++row) {
      write_sums<decltype(element)>(a, row, begin, outs, sums + row * outs, bias);
    }
  });
}

// The outputs of all layers, in chunks of one layer each. Each worker begins with a share of them that lies together in memory,
// then takes from others' shares.
void multiply_few_rows(const LayersOfInput& layers, Workers& workers) {
  const LinearArguments& input = *layers.first;
  const int64_t padded = round_up(input.in_features, kLanes), shares = workers.count();
  constexpr int64_t kLine = 64 / sizeof(int64_t);
  const size_t floats = static_cast<size_t>(input.tokens * padded);
  float* groups =
      static_cast<float*>(workers.shared_scratch(floats * sizeof(float) + static_cast<size_t>(shares * kLine) * sizeof(int64_t)));
  int64_t* taken = reinterpret_cast<int64_t*>(groups + floats);  // of each share, on a line of its own
  for (int64_t row = 0; row < input.tokens; row += kGroupRows) {
    pack_rows(input, row, smaller(input.tokens - row, kGroupRows), groups + row * padded);
  }
  for (int64_t share = 0; share < shares; ++share) taken[share * kLine] = 0;

  int64_t outs = 0, chunks = 0;
  for (const LinearArguments& a : layers) outs += a.out_features;
  if (outs == 0) return;
  const int64_t chunk = smaller(kMostChunkOuts, divide_up(outs, kChunksPerWorker * shares));
  for (const LinearArguments& a : layers) chunks += divide_up(a.out_features, chunk);
  const MemoryReading reading = workers.memory_reading();
  const auto multiply = [&](int64_t index, int64_t end) {
    const LinearArguments* a = layers.begin();
    for (int64_t count; (count = divide_up(a->out_features, chunk)) <= index; ++a, index -= count, end -= count) {
    }
    const int64_t begin = index * chunk;
    multiply_chunk(*a, {groups, padded}, reading, begin, smaller(chunk, a->out_features - begin),
                   smaller(end * chunk, a->out_features));
  };
  workers.for_each(static_cast<size_t>(shares), [&](size_t own, int) {
    for (int64_t turn = 0; turn < shares; ++turn) {
      const int64_t share = (static_cast<int64_t>(own) + turn) % shares, first = chunks * share / shares;
      const int64_t end = chunks * (share + 1) / shares;
      for (int64_t index; (index = first + __atomic_fetch_add(taken + share * kLine, 1, __ATOMIC_RELAXED)) < end;) {
        multiply(index, end);
      }
    }
  });
}

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
