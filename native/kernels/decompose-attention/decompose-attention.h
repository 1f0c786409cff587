// The slash, vertical and horizontal parts of a prompt's attention (Sparse Skeleton, Algorithm 1), for the last rows of
// one sequence: for query head h, row i and key j <= i
//   ln softmax_j(scale q[h, i] . k[j]) ~ slash[h, i - j] + vertical[h, j] + horizontal[h, i].
// The first S keys are sinks, the T keys up to a row's own are its diagonal, the others are its interior. With r(l) the
// cosines and sines of the angles -l * frequency, x_j the key before its rotation, and means over a row's interior,
//   (r(i - j) - mean r) alpha + (x_j - mean x) kappa ~ scale q_i . k_j - mu_i              least squares, Eq. 3
//   slash[l] = (r(l) - mean r of the last row) alpha                                       Eq. 4
//   vertical[j] = (x_j - mean x of the last row) kappa                                     Eq. 6
//   horizontal[i] = -(mean of slash and vertical over the row's interior) - nu_i           Eq. 5, 11
//   nu_i = ln(sum over sinks and diagonal of e^(scale q_i . k_j - mu_i) + n_i e^(sigma_i^2 / 2 - zeta))   Eq. 10
// where zeta makes the last row exact. docs/methods/skeleton-prefill.md says where this corrects the paper.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/rope/rope.h"
#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"
#include "shared/paged/paged-faults.h"

namespace kv {

enum class DecompositionFormulas : int32_t {
  corrected,
  paper,  // lines 3, 4, 16 and 18 of Algorithm 1 as they are printed
};

// The batch has one entry, whose rows are the last of its sequence; every kv head counts `tokens` keys, theirs included.
struct DecomposeAttentionArguments : PagedBatch {
  // [token, query_head, dim], after RoPE. Strides count elements; dim is contiguous.
  const void* query = nullptr;
  int64_t query_token_stride = 0;
  int64_t query_head_stride = 0;
  DType query_dtype = DType::f32;
  int32_t query_heads = 0;  // a multiple of kv_heads
  const void* keys = nullptr;  // the pool
  float scale = 1;

  const float* inverse_frequencies = nullptr;  // [pair], radians a position
  int32_t pairs = 0;                           // 2 * pairs <= head_dim
  RopeConvention convention = RopeConvention::half_split;
  float attention_scale = 1;

  // What calls leave for those on the sequence's later rows, [state_values]. Of a sequence of which none has been seen it
  // is only written.
  double* state = nullptr;
  int64_t state_values = 0;
  int32_t seen_tokens = 0;  // at the end of the call that left the state; at most tokens - rows

  int32_t sink_tokens = 0;      // S
  int32_t diagonal_tokens = 1;  // T, from 1 on
  int32_t samples = 0;          // of all rows of the sequence together
  uint64_t seed = 0;
  double ridge = 0;  // lambda of line 13 is half of this times the norm of A
  DecompositionFormulas formulas = DecompositionFormulas::corrected;

  float* slash = nullptr;       // [query_head, tokens], by lag
  float* vertical = nullptr;    // [query_head, tokens]
  float* horizontal = nullptr;  // [query_head, rows]
  int32_t tokens = 0;
  int32_t rows = 0;

  constexpr int32_t group() const { return query_heads / kv_heads; }
  // Regressors of the least squares: alpha, then kappa.
  constexpr int32_t coefficients() const { return 2 * pairs + head_dim; }
};

// Where things lie in the state, for each kv head and then each query head. Sums are over the keys that were the
// interior of the last row that was seen.
struct DecompositionState {
  int64_t dim;
  int64_t coefficients;
  int64_t kv_heads;
  int64_t query_heads;

  constexpr explicit DecompositionState(const DecomposeAttentionArguments& a)
      : dim(a.head_dim), coefficients(a.coefficients()), kv_heads(a.kv_heads), query_heads(a.query_heads) {}

  constexpr int64_t of_head() const { return 3 * dim + dim * dim + coefficients * coefficients; }
  constexpr int64_t values() const { return kv_heads * of_head() + query_heads * coefficients; }

  // What is taken off every key, which changes no variance and few roundings.
  constexpr double* centre(double* state, int64_t kv_head) const { return state + kv_head * of_head(); }
  // Of keys without their centre: their sum, and the sum of their outer products.
  constexpr double* key_sum(double* state, int64_t kv_head) const { return centre(state, kv_head) + dim; }
  constexpr double* plain_sum(double* state, int64_t kv_head) const { return centre(state, kv_head) + 2 * dim; }
  constexpr double* moments(double* state, int64_t kv_head) const { return centre(state, kv_head) + 3 * dim; }
  // AᵀA, of which the lower triangle counts, and Aᵀb.
  constexpr double* gram(double* state, int64_t kv_head) const { return moments(state, kv_head) + dim * dim; }
  constexpr double* right_side(double* state, int64_t query_head) const {
    return state + kv_heads * of_head() + query_head * coefficients;
  }
};

enum class DecomposeAttentionFault : int32_t {
  other_count = static_cast<int32_t>(PagedFault::operations_own),  // value: what is counted; row: the kv head, or -1 of rows
};

std::string describe_decompose_attention_fault(const Fault& fault);

// Refuses sizes and dtypes that contradict each other, tables that lead outside, and counts of rows or keys that are not
// the tensors' (invalid_value, capability). Where a head's least squares have no finite solution, its slash and vertical
// parts are NaN.
Status decompose_attention(const DecomposeAttentionArguments& arguments, ExecutionContext& context);

}  // namespace kv
