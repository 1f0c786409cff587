// The slash, vertical and horizontal parts of a prompt's attention (Sparse Skeleton, Algorithm 1), for the last rows
// of one sequence. For query head h, row i and key j <= i:
//   ln softmax_j(scale q[h, i] . k[j]) ~ slash[h, i - j] + vertical[h, j] + horizontal[h, i].
// The first S keys are sinks. The T keys up to a row's own are its diagonal. All other keys are its interior. Let
// r(l) be the cosines and sines of the angles -l * frequency, and x_j the key before its rotation. Means are over a
// row's interior.
//   (r(i - j) - mean r) alpha + (x_j - mean x) kappa ~ scale q_i . k_j - mu_i              least squares, Eq. 3
//   slash[l] = (r(l) - mean r of the last row) alpha                                       Eq. 4
//   vertical[j] = (x_j - mean x of the last row) kappa                                     Eq. 6
//   horizontal[i] = -(mean of slash and vertical over the row's interior) - nu_i           Eq. 5, 11
//   nu_i = ln(sum over sinks and diagonal of e^(scale q_i . k_j - mu_i) + n_i e^(sigma_i^2 / 2 - zeta))   Eq. 10
// zeta makes the last row exact. docs/methods/skeleton-prefill.md says where this corrects the paper.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/rope/rope.h"
#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-faults.h"
#include "shared/paged/prompt-queries.h"

namespace kv {

enum class DecompositionFormulas : int32_t {
  corrected,
  paper,  // lines 3, 4, 16 and 18 of Algorithm 1 as printed
};

// Every kv head must count `tokens` keys, the rows' own included.
struct DecomposeAttentionArguments : PromptQueries {
  const float* inverse_frequencies = nullptr;  // [pair], radians a position
  int32_t pairs = 0;                           // 2 * pairs <= head_dim
  RopeConvention convention = RopeConvention::half_split;
  float attention_scale = 1;

  // [state_values]: what a call leaves for the next call on the same sequence. The first call of a sequence only
  // writes it.
  double* state = nullptr;
  int64_t state_values = 0;
  int32_t seen_tokens = 0;  // tokens when the state was left; at most tokens - rows

  int32_t sink_tokens = 0;      // S
  int32_t diagonal_tokens = 1;  // T, at least 1
  int32_t samples = 0;          // for all rows of the sequence in one call
  uint64_t seed = 0;
  double ridge = 0;  // lambda of line 13 is half of this times the norm of A
  DecompositionFormulas formulas = DecompositionFormulas::corrected;

  float* slash = nullptr;       // [query_head, tokens], by lag
  float* vertical = nullptr;    // [query_head, tokens]
  float* horizontal = nullptr;  // [query_head, rows]
  int32_t tokens = 0;
  int32_t rows = 0;

  // The number of regressors of the least squares: alpha, then kappa.
  constexpr int32_t coefficients() const { return 2 * pairs + head_dim; }
};

// Where numbers lie in the state, for each kv head and then for each query head. Sums are over the keys in the
// interior of the last row of the previous call.
struct DecompositionState {
  int64_t dim;
  int64_t coefficients;
  int64_t kv_heads;
  int64_t query_heads;

  constexpr explicit DecompositionState(const DecomposeAttentionArguments& a)
      : dim(a.head_dim), coefficients(a.coefficients()), kv_heads(a.kv_heads), query_heads(a.query_heads) {}

  constexpr int64_t of_head() const { return 3 * dim + dim * dim + coefficients * coefficients; }
  constexpr int64_t values() const { return kv_heads * of_head() + query_heads * coefficients; }

  // The vector that is subtracted from every key. This changes no variance, and less is lost to rounding.
  constexpr double* centre(double* state, int64_t kv_head) const { return state + kv_head * of_head(); }
  // The sum of keys without their centre, the sum of keys before their rotation, and the sum of outer products.
  constexpr double* key_sum(double* state, int64_t kv_head) const { return centre(state, kv_head) + dim; }
  constexpr double* plain_sum(double* state, int64_t kv_head) const { return centre(state, kv_head) + 2 * dim; }
  constexpr double* moments(double* state, int64_t kv_head) const { return centre(state, kv_head) + 3 * dim; }
  // AᵀA, of which only the lower triangle is used, and Aᵀb.
  constexpr double* gram(double* state, int64_t kv_head) const { return moments(state, kv_head) + dim * dim; }
  constexpr double* right_side(double* state, int64_t query_head) const {
    return state + kv_heads * of_head() + query_head * coefficients;
  }
};

enum class DecomposeAttentionFault : int32_t {
  // value: the count that was found; row: the kv head, or -1 for the count of rows
  other_count = static_cast<int32_t>(PagedFault::operations_own),
};

std::string describe_decompose_attention_fault(const Fault& fault);

// Refuses sizes and dtypes that contradict each other, tables with numbers out of range, and counts of rows or keys
// that differ from the tensors' (invalid_value, capability). If a head's least squares have no finite solution, its
// slash and vertical parts are NaN.
Status decompose_attention(const DecomposeAttentionArguments& arguments, ExecutionContext& context);

}  // namespace kv
