// The functions that the scripts of tools/gpu time, of libcuda-kernels.so.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>

#include "runtime/device.h"
#include "runtime/fault.h"
#include "shared/paged/paged-attention.h"
#include "tests/cuda/kernels/device.cuda.h"

#define KV_FOR_PYTHON extern "C" __attribute__((visibility("default")))

namespace kv::tests {

// Returns 0, or prints why not.
inline int result_for_python(const Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.message.c_str());
  return 1;
}

// Where all these functions report bad data; kv_take_fault reads it.
inline Fault* fault_for_python() {
  static Fault* const fault = [] {
    Fault* pinned = nullptr;
    succeeds(cudaHostAlloc(&pinned, sizeof(Fault), cudaHostAllocPortable));
    *pinned = Fault{};
    return pinned;
  }();
  return fault;
}

// Working memory that only grows; call an operation once before its launches are captured.
class GrowingQueue : public Queue {
 public:
  void* workspace(size_t bytes) override { return any_.of(bytes); }
  void* zeroed_workspace(size_t bytes) override { return zeroed_.of(bytes); }
  void* side_stream() override {
    if (side_ == nullptr) succeeds(cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, -5));
    return side_;
  }

 private:
  // All zero when it has grown.
  struct Memory {
    void* data = nullptr;
    size_t bytes = 0;

    void* of(size_t wanted) {
      if (wanted > bytes) {
        cudaFree(data);
        bytes = cudaMalloc(&data, wanted) == cudaSuccess ? wanted : 0;
        if (bytes > 0) succeeds(cudaMemset(data, 0, bytes));
      }
      return bytes == 0 ? nullptr : data;
    }
  };

  Memory any_;
  Memory zeroed_;
  cudaStream_t side_ = nullptr;
};

// Launches an operation on a stream of the script.
template <class Operation, class Arguments>
Status launch_for_python(Operation&& operation, const Arguments& arguments, void* stream) {
  static GrowingQueue queue;
  static Workers workers(1);
  ExecutionContext context{workers};
  context.device = DeviceKind::cuda;
  context.cuda_stream = stream;
  context.queue = &queue;
  context.fault = fault_for_python();
  return operation(arguments, context);
}

// `sizes`: kernel (0 prefill, 1 decode, 2 prefill for sm_80), rows, batch, query heads, kv heads, head dim, block
// tokens, table width, causal, bf16, blocks. `pointers`: query, output, log-sum-exp, keys, values, table, counts, slots,
// query start, workspace, counters. Tensors are contiguous.
inline PagedAttentionArguments attention_for_python(const int64_t* sizes, void* const* pointers, float scale) {
  PagedAttentionArguments arguments;
  arguments.query_tokens = static_cast<int32_t>(sizes[1]);
  arguments.batch = static_cast<int32_t>(sizes[2]);
  arguments.query_heads = static_cast<int32_t>(sizes[3]);
  arguments.kv_heads = static_cast<int32_t>(sizes[4]);
  arguments.head_dim = static_cast<int32_t>(sizes[5]);
  arguments.block_tokens = static_cast<int32_t>(sizes[6]);
  arguments.table_width = static_cast<int32_t>(sizes[7]);
  arguments.causal = sizes[8] != 0;
  arguments.cache_dtype = sizes[9] ? DType::bf16 : DType::f16;
  arguments.query_dtype = arguments.output_dtype = arguments.cache_dtype;
  arguments.block_count = static_cast<int32_t>(sizes[10]);
  arguments.slot_count = arguments.batch;
  arguments.query_token_stride = arguments.output_token_stride = sizes[3] * sizes[5];
  arguments.query_head_stride = arguments.output_head_stride = sizes[5];
  arguments.token_stride = sizes[5];
  arguments.block_stride = sizes[5] * sizes[6];
  arguments.query = pointers[0];
  arguments.output = pointers[1];
  arguments.log_sum_exp = static_cast<float*>(pointers[2]);
  arguments.keys = pointers[3];
  arguments.values = pointers[4];
  arguments.block_table = static_cast<const int32_t*>(pointers[5]);
  arguments.key_counts = static_cast<int32_t*>(pointers[6]);
  arguments.slots = static_cast<const int32_t*>(pointers[7]);
  arguments.query_start = static_cast<const int32_t*>(pointers[8]);
  arguments.scale = scale;
  return arguments;
}

}  // namespace kv::tests
