// Observation scores, token selection and gathering as a shared library that needs nothing but a driver, for
// torch-selection.py to check and time. README.md says how to build it.
#include <cuda_runtime.h>

#include <cstdio>
#include <string>

#include "kernels/gather-kv/gather-kv.h"
#include "kernels/observation-scores/observation-scores.h"
#include "kernels/select-tokens/select-tokens.h"
#include "runtime/device.h"
#include "runtime/fault.h"

namespace kv {

Status observation_scores_cuda(const ObservationScoresArguments& arguments, ExecutionContext& context);
Status select_tokens_cuda(const SelectTokensArguments& arguments, ExecutionContext& context);
Status gather_kv_cuda(const GatherKvArguments& arguments, ExecutionContext& context);

}  // namespace kv

namespace {

// Working memory that only grows; call an operation once before its launches are captured.
class GrowingQueue : public kv::Queue {
 public:
  void* workspace(size_t bytes) override {
    if (bytes > bytes_) {
      cudaFree(data_);
      bytes_ = cudaMalloc(&data_, bytes) == cudaSuccess ? bytes : 0;
    }
    return bytes_ == 0 ? nullptr : data_;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

kv::Fault* fault() {
  static kv::Fault* const fault = [] {
    kv::Fault* pinned = nullptr;
    cudaHostAlloc(&pinned, sizeof(kv::Fault), cudaHostAllocPortable);
    *pinned = kv::Fault{};
    return pinned;
  }();
  return fault;
}

template <class Arguments>
int run(kv::Status (*operation)(const Arguments&, kv::ExecutionContext&), const Arguments& arguments, void* stream) {
  static GrowingQueue queue;
  static kv::Workers workers(1);
  kv::ExecutionContext context{workers};
  context.device = kv::DeviceKind::cuda;
  context.cuda_stream = stream;
  context.queue = &queue;
  context.faults.fault = fault();
  const kv::Status status = operation(arguments, context);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message.c_str());
  return status.ok() ? 0 : 1;
}

int32_t size(const int64_t* sizes, int i) { return static_cast<int32_t>(sizes[i]); }

}  // namespace

// sizes: batch, query tokens, kv heads, query heads, dim, block tokens, table width, blocks, slots, domain,
// reduction, score tokens, dtype. pointers: query start, slots, block table, key counts, query, keys, scores.
extern "C" int kv_observation_scores(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  kv::ObservationScoresArguments a;
  a.batch = size(sizes, 0);
  a.query_tokens = size(sizes, 1);
  a.kv_heads = size(sizes, 2);
  a.query_heads = size(sizes, 3);
  a.head_dim = size(sizes, 4);
  a.block_tokens = size(sizes, 5);
  a.table_width = size(sizes, 6);
  a.block_count = size(sizes, 7);
  a.slot_count = size(sizes, 8);
  a.domain = static_cast<kv::ScoreDomain>(sizes[9]);
  a.reduction = static_cast<kv::GroupReduction>(sizes[10]);
  a.score_tokens = size(sizes, 11);
  a.query_dtype = a.cache_dtype = static_cast<kv::DType>(sizes[12]);
  a.token_stride = a.head_dim;
  a.block_stride = int64_t{a.block_tokens} * a.head_dim;
  a.query_head_stride = a.head_dim;
  a.query_token_stride = int64_t{a.query_heads} * a.head_dim;
  a.query_start = static_cast<const int32_t*>(pointers[0]);
  a.slots = static_cast<const int32_t*>(pointers[1]);
  a.block_table = static_cast<const int32_t*>(pointers[2]);
  a.key_counts = static_cast<int32_t*>(pointers[3]);
  a.query = pointers[4];
  a.keys = pointers[5];
  a.scores = static_cast<float*>(pointers[6]);
  a.scale = scale;
  return run(kv::observation_scores_cuda, a, stream);
}

// sizes: rows, score tokens, index tokens, overlapping, fill, sinks, pooling, pool tokens, groups of each round.
// pointers: scores, rows, indices, counts.
extern "C" int kv_select_tokens(const int64_t* sizes, int rounds, void* const* pointers, void* stream) {
  kv::SelectTokensArguments a;
  a.row_count = size(sizes, 0);
  a.score_tokens = size(sizes, 1);
  a.index_tokens = size(sizes, 2);
  a.overlapping_rounds = sizes[3] != 0;
  a.fill = sizes[4] != 0;
  a.sink_tokens = size(sizes, 5);
  a.pooling = static_cast<kv::ScorePooling>(sizes[6]);
  a.pool_tokens = size(sizes, 7);
  a.round_count = rounds;
  for (int round = 0; round < rounds; ++round) a.rounds[round] = size(sizes, 8 + round);
  a.scores = static_cast<const float*>(pointers[0]);
  a.rows = static_cast<const kv::SelectTokensRow*>(pointers[1]);
  a.indices = static_cast<int32_t*>(pointers[2]);
  a.counts = static_cast<int32_t*>(pointers[3]);
  return run(kv::select_tokens_cuda, a, stream);
}

// sizes: kv heads, dim, block tokens, table width, index tokens, dtype. pointers: keys, values, block table, key
// counts, indices, counts.
extern "C" int kv_gather_kv(const int64_t* sizes, void* const* pointers, void* stream) {
  kv::GatherKvArguments a;
  a.kv_heads = size(sizes, 0);
  a.head_dim = size(sizes, 1);
  a.block_tokens = size(sizes, 2);
  a.table_width = size(sizes, 3);
  a.index_stride = sizes[4];
  a.cache_dtype = static_cast<kv::DType>(sizes[5]);
  a.token_stride = a.head_dim;
  a.block_stride = int64_t{a.block_tokens} * a.head_dim;
  a.key_pool = pointers[0];
  a.value_pool = pointers[1];
  a.block_table = static_cast<const int32_t*>(pointers[2]);
  a.key_counts = static_cast<int32_t*>(pointers[3]);
  a.indices = static_cast<const int32_t*>(pointers[4]);
  a.counts = static_cast<const int32_t*>(pointers[5]);
  return run(kv::gather_kv_cuda, a, stream);
}

// The code of the first fault that the device reported; 0 without one.
extern "C" int kv_take_fault() {
  const int code = static_cast<int>(fault()->code);
  *fault() = kv::Fault{};
  return code;
}
