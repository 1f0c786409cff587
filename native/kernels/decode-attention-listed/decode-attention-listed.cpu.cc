#include "kernels/decode-attention-listed/decode-attention-listed.h"

#include "shared/attention/decode/key-splits.cpu.h"
#include "shared/row-lists/list-pieces.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int32_t kRunRows = 32;  // that stay in the first cache for all query heads
constexpr int32_t kAhead = 128;   // rows that are asked for before they are needed
constexpr int kLine = 64;

// Rows of a pool that a list names, as a run (key-run.cpu.h). The first `known` of the list from here on may be asked for.
template <class T>
struct ListedRun {
  const T* pool;
  const int32_t* rows;
  int count;
  int known;
  int64_t dim;

  Vec at(int row, int d) const { return load(pool + rows[row] * dim + d); }
  __attribute__((always_inline)) void fetch(int row, int first, int elements) const {
    if (row >= known) return;
    const auto* line = reinterpret_cast<const char*>(pool + rows[row] * dim + first);
    for (int at = 0; at < elements * int{sizeof(T)}; at += kLine) __builtin_prefetch(line + at);
  }
  template <int kRows>
  __attribute__((always_inline)) void fetch_next(int row, int first, int elements) const { fetch(row + kAhead, first, elements); }
};

// Attention over the rows of a piece, of all query heads of its kv head.
class PieceAttention {
 public:
  PieceAttention(const DecodeAttentionListedArguments& a, const Piece& piece, const Partials& partials, int64_t index)
      : a_(a), piece_(piece), partials_(partials), index_(index), rows_(a.value_rows + piece.list * a.capacity + piece.first) {}

  static size_t scratch_bytes(int32_t group, int dim) {
    return static_cast<size_t>(group * (dim + kScoreStride) + kRunRows * dim) * sizeof(float);
  }

  void attend(float* scratch) const {
    const int dim = partials_.dim;
    float* queries = scratch;
    float* scores = queries + a_.group * dim;
    float* padded = scores + a_.group * kScoreStride;
    with_float_type(a_.query_dtype, [&](auto element) { load_queries<decltype(element)>(queries); });
    with_float_type(a_.key_dtype, [&](auto element) {
      for_each_run<decltype(element)>(a_.keys, padded, [&](auto run, int32_t first) {
        for_each_row_group(a_.group, [&](int64_t head, auto heads) {
          score_run<decltype(heads)::count>(queries + head * dim, run, dim, scores + head * kScoreStride + first, kScoreStride);
        });
      });
    });
    for (int32_t head = 0; head < a_.group; ++head) {
      find_maximum(scores + head * kScoreStride, piece_.rows, partials_.at(index_, head));
    }
    for (int32_t head = 0; head < a_.group; ++head) {
      weigh(scores + head * kScoreStride, partials_.at(index_, head));
      if (a_.value_scales != nullptr) scale_weights(scores + head * kScoreStride);
    }
    float* output = partials_.at(index_, 0).output;
    std::memset(output, 0, static_cast<size_t>(a_.group * dim) * sizeof(float));
    with_value_type(a_.value_dtype, [&](auto element) {
      for_each_run<decltype(element)>(a_.values, padded, [&](auto run, int32_t first) {
        for_each_row_group(a_.group, [&](int64_t head, auto heads) {
          add_values<decltype(heads)::count>(scores + head * kScoreStride + first, kScoreStride, run, dim, output + head * dim);
        });
      });
    });
  }

 private:
  template <class T>
  void load_queries(float* queries) const {
    const int dim = partials_.dim;
    const T* first = static_cast<const T*>(a_.query) + piece_.list / a_.kv_heads * a_.query_row_stride +
                     piece_.list % a_.kv_heads * a_.group * a_.query_head_stride;
    for (int32_t head = 0; head < a_.group; ++head) {
      float* query = queries + head * dim;
      load_row(first + head * a_.query_head_stride, query, a_.head_dim, dim);
      for (int d = 0; d < dim; d += kLanes) store(query + d, load(query + d) * a_.scale);
    }
  }

  // Calls body(run, its first row). If a row's length is no multiple of kLanes, runs are f32 copies in `padded`.
  template <class T, class Body>
  void for_each_run(const void* pool, float* padded, Body&& body) const {
    const int dim = partials_.dim;
    const auto* elements = static_cast<const T*>(pool);
    for (int32_t first = 0; first < piece_.rows; first += kRunRows) {
      const int32_t left = piece_.rows - first;
      const int count = left < kRunRows ? left : kRunRows;
      if (dim == a_.head_dim) {
        const ListedRun<T> run{elements, rows_ + first, count, left, dim};
        for (int row = 0; first == 0 && row < kAhead; ++row) run.fetch(row, 0, dim);
        body(run, first);
        continue;
      }
      for (int row = 0; row < count; ++row) load_row(elements + int64_t{rows_[first + row]} * a_.head_dim, padded + row * dim, a_.head_dim, dim);
      body(Run<float>{padded, padded, dim, count}, first);
    }
  }

  void scale_weights(float* weights) const {
    for (int32_t row = 0; row < piece_.rows; ++row) weights[row] *= bfloat_to_float(a_.value_scales[rows_[row]]);
  }

  const DecodeAttentionListedArguments& a_;
  const Piece& piece_;
  const Partials& partials_;
  const int64_t index_;
  const int32_t* rows_;
};

}  // namespace

void decode_attention_listed(const DecodeAttentionListedArguments& a, Workers& workers) {
  const int64_t pieces = ListPieces::count(a, kSplitKeys);
  const int dim = PlainRows::dim_of(a.head_dim);
  auto* memory = static_cast<char*>(workers.shared_scratch(ListPieces::bytes(a, pieces) + Partials::bytes(pieces, a.group, dim)));
  const ListPieces table(a, kSplitKeys, pieces, memory);
  const Partials partials{reinterpret_cast<float*>(memory + ListPieces::bytes(a, pieces)), a.group, dim};
  workers.for_each(static_cast<size_t>(pieces), [&](size_t index, int worker) {
    if (table[index].leads_outside(a)) return;
    auto* scratch = static_cast<float*>(workers.scratch(worker, PieceAttention::scratch_bytes(a.group, dim)));
    PieceAttention(a, table[index], partials, static_cast<int64_t>(index)).attend(scratch);
  });
  if (*a.list_outside >= 0) return;
  const auto heads = static_cast<size_t>(a.lists() * a.group);
  workers.for_each(heads, [&](size_t index, int) {
    const auto list = static_cast<int64_t>(index) / a.group;
    const auto head = static_cast<int64_t>(index) % a.group;
    const int64_t first = table.first_of(list);
    const RowSum all = merge_splits(partials, head, first, table.first_of(list + 1));
    float& log_sum_exp = a.log_sum_exp[index];
    const bool is_odd = log_sum_exp != log_sum_exp;
    if (!is_odd) log_sum_exp = all.sum == 0 ? -HUGE_VALF : all.peak + logf(all.sum);
    const float inverse = 1.0f / all.sum;
    const float* total = partials.at(first, head).output;
    float* output = a.output + index * static_cast<size_t>(a.head_dim);
    for (int32_t d = 0; d < a.head_dim; ++d) output[d] = is_odd ? log_sum_exp : all.sum == 0 ? 0.0f : total[d] * inverse;
  });
}

}  // namespace KV_ISA
}  // namespace kv
