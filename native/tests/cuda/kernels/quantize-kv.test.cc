#include "kernels/quantize-kv/quantize-kv.h"

#include <string>
#include <vector>

#include "kernels/dequantize-kv/dequantize-kv.h"
#include "runtime/isa.h"
#include "tests/check.h"
#include "tests/cuda/cuda-testing.h"
#include "tests/cuda/kernels/case-loop.h"
#include "tests/cuda/kernels/device.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"
#include "tests/quantized-case.h"

namespace kv::tests {
namespace {

struct Heads {
  std::string name;
  DType dtype;
  int head_dim;
  int blocks;
};

std::vector<Heads> all_heads() {
  std::vector<Heads> list;
  for (const int head_dim : {1, 7, 20, 48, 64, 80, 96, 128, 192, 256, 512}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      const char* type = dtype == DType::f32 ? "f32" : dtype == DType::f16 ? "f16" : "bf16";
      list.push_back({"heads of " + std::to_string(head_dim) + " " + type, dtype, head_dim, only_small_cases() ? 3 : 50});
    }
  }
  return list;
}

// Quantizes and restores on the GPU. `test` gets what the kernels wrote.
void run_on_gpu(QuantizedCase& test) {
  DeviceBuffer<uint8_t> keys(test.keys), values(test.values), quantized_keys(test.quantized_keys),
      quantized_values(test.quantized_values), restored_keys(test.restored_keys), restored_values(test.restored_values);
  DeviceBuffer<int32_t> from(test.from), to(test.to);
  QuantizeKvArguments there = test.quantization();
  there.keys = keys.get();
  if (!test.keys_alone) there.values = values.get();
  there.quantized_keys = quantized_keys.get();
  there.quantized_values = quantized_values.get();
  there.from = from.get();
  there.to = to.get();
  DequantizeKvArguments back = test.dequantization();
  back.quantized_keys = quantized_keys.get();
  back.quantized_values = quantized_values.get();
  back.keys = restored_keys.get();
  if (!test.keys_alone) back.values = restored_values.get();
  back.from = to.get();
  back.to = from.get();
  Stream stream(cuda_device());
  stream.enqueue({"quantizeKv", {}, [there](ExecutionContext& context) { return quantize_kv(there, context); }});
  stream.enqueue({"dequantizeKv", {}, [back](ExecutionContext& context) { return dequantize_kv(back, context); }});
  CHECK(reached(stream).ok());
  test.quantized_keys = quantized_keys.host();
  test.quantized_values = quantized_values.host();
  test.restored_keys = restored_keys.host();
  test.restored_values = restored_values.host();
}

Outcome compare(const Heads& heads, Random& random) {
  QuantizedCase here = QuantizedCase::random(random, heads.dtype, heads.head_dim, heads.blocks);
  QuantizedCase there = here;
  Outcome outcome;
  outcome.expect(here.run_on_cpu(best_isa(), 2), "the CPU fails");
  run_on_gpu(there);
  outcome.expect(there.quantizes_like(here), "quantized bytes differ from the CPU's");
  outcome.expect(there.restores_like(here), "restored numbers differ from the CPU's");
  return outcome;
}

}  // namespace

TEST("quantize-kv and dequantize-kv give the CPU's bytes") { run_cases(all_heads(), compare); }

}  // namespace kv::tests

// For torch-hcattn.py, contiguous tensors; returns 0, or prints why not.
// `sizes`: head dim, bf16, key bits, value bits, copies. `pointers`: keys, values, quantized keys, quantized values, from,
// to.
KV_FOR_PYTHON int kv_quantize(const int64_t* sizes, void* const* pointers, void* stream) {
  kv::QuantizeKvArguments arguments;
  arguments.head_dim = static_cast<int32_t>(sizes[0]);
  arguments.token_stride = sizes[0];
  arguments.block_stride = kv::kQuantizedBlockTokens * sizes[0];
  arguments.dtype = sizes[1] != 0 ? kv::DType::bf16 : kv::DType::f16;
  arguments.key_bits = static_cast<int32_t>(sizes[2]);
  arguments.value_bits = static_cast<int32_t>(sizes[3]);
  arguments.copies = static_cast<int32_t>(sizes[4]);
  arguments.keys = pointers[0];
  arguments.values = pointers[1];
  arguments.quantized_keys = static_cast<uint8_t*>(pointers[2]);
  arguments.quantized_values = static_cast<uint8_t*>(pointers[3]);
  arguments.from = static_cast<const int32_t*>(pointers[4]);
  arguments.to = static_cast<const int32_t*>(pointers[5]);
  return kv::tests::result_for_python(kv::tests::launch_for_python(kv::quantize_kv, arguments, stream));
}
