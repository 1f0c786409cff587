#include "kernels/linear/linear-cublas-lt.cuda.h"

#include <map>
#include <mutex>
#include <tuple>

#include "runtime/cublas-lt.cuda.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;

Status cublas_status(int result, const char* what) {
  if (result == 0) return Status::success();
  return Status::failure(StatusCode::device_fault, std::string("cuBLASLt: ") + what + " returned " + std::to_string(result));
}

cudaDataType_t data_type(DType dtype) {
  return dtype == DType::f16 ? CUDA_R_16F : dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

// Row-major output = input * weight^T is, in cuBLAS's column-major terms, D = A^T B with A the weight
// [in, out], B the input [in, token] and D the output [out, token].
class Plan {
 public:
  Plan(const CublasLt& lt, CublasLtHandle handle, const LinearArguments& a) : lt_(lt) {
    const cudaDataType_t type = data_type(a.dtype);
    const auto [tokens, in, out] = std::tuple<uint64_t, uint64_t, uint64_t>(a.tokens, a.in_features, a.out_features);
    check(lt.matmul_create(&matmul_, kCublasCompute32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    set(kMatmulTransposeA, kCublasTranspose);
    if (a.bias != nullptr) set(kMatmulEpilogue, kCublasEpilogueBias);
    check(lt.layout_create(&weight_, type, in, out, a.weight_stride), "cublasLtMatrixLayoutCreate");
    check(lt.layout_create(&input_, type, in, tokens, a.input_stride), "cublasLtMatrixLayoutCreate");
    check(lt.layout_create(&output_, type, out, tokens, a.output_stride), "cublasLtMatrixLayoutCreate");
    CublasLtDescriptor preference = nullptr;
    check(lt.preference_create(&preference), "cublasLtMatmulPreferenceCreate");
    check(lt.preference_set(preference, kPreferenceWorkspaceBytes, &kWorkspaceBytes, sizeof kWorkspaceBytes),
          "cublasLtMatmulPreferenceSetAttribute");
    int found = 0;
    if (status_.ok()) {
      check(lt.heuristic(handle, matmul_, weight_, input_, output_, output_, preference, 1, &choice_, &found),
            "cublasLtMatmulAlgoGetHeuristic");
    }
    if (status_.ok() && found == 0) check(-1, "the search for an algorithm");
    if (preference != nullptr) lt.preference_destroy(preference);
  }

  ~Plan() {
    for (CublasLtDescriptor layout : {weight_, input_, output_}) {
      if (layout != nullptr) lt_.layout_destroy(layout);
    }
    if (matmul_ != nullptr) lt_.matmul_destroy(matmul_);
  }

  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  Status run(CublasLtHandle handle, const LinearArguments& a, ExecutionContext& context) {
    if (!status_.ok()) return status_;
    void* workspace = context.workspace(kWorkspaceBytes);
    if (workspace == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for cuBLASLt's workspace");
    if (a.bias != nullptr) set(kMatmulBias, a.bias);
    const float alpha = 1;
    const float beta = a.accumulate ? 1 : 0;
    return cublas_status(
        lt_.matmul(handle, matmul_, &alpha, a.weight, weight_, a.input, input_, &beta, a.output, output_, a.output,
                   output_, &choice_.algorithm, workspace, kWorkspaceBytes, stream_of(context)),
        "cublasLtMatmul");
  }

 private:
  template <class T>
  void set(int attribute, const T& value) {
    if (matmul_ != nullptr) check(lt_.matmul_set(matmul_, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  }
  void check(int result, const char* what) {
    if (status_.ok()) status_ = cublas_status(result, what);
  }

  const CublasLt& lt_;
  Status status_;
  CublasLtDescriptor matmul_ = nullptr;
  CublasLtDescriptor weight_ = nullptr;
  CublasLtDescriptor input_ = nullptr;
  CublasLtDescriptor output_ = nullptr;
  CublasLtHeuristic choice_{};
};

using Shape = std::tuple<int, DType, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool>;

// Plans of the shapes seen so far: choosing an algorithm costs more than a small product.
struct Plans {
  std::mutex mutex;
  CublasLtHandle handle = nullptr;
  std::map<Shape, Plan> by_shape;
};

}  // namespace

bool cublas_lt_multiplies(const LinearArguments& a) {
  const auto aligned = [&](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * static_cast<int64_t>(byte_size(a.dtype)) % 16 == 0;
  };
  return a.dtype == a.weight_dtype && a.dtype != DType::f32 && (a.bias == nullptr || a.bias_dtype == a.dtype) &&
         aligned(a.input, a.input_stride) && aligned(a.weight, a.weight_stride) && aligned(a.output, a.output_stride) &&
         cublas_lt() != nullptr;
}

Status linear_cublas_lt(const LinearArguments& a, ExecutionContext& context) {
  static Plans plans;
  const CublasLt& lt = *cublas_lt();
  int device = 0;
  const Status current = cuda_status(cudaGetDevice(&device));
  if (!current.ok()) return current;
  const std::lock_guard<std::mutex> lock(plans.mutex);
  if (plans.handle == nullptr) {
    const Status created = cublas_status(lt.create(&plans.handle), "cublasLtCreate");
    if (!created.ok()) return created;
  }
  const Shape shape{device,         a.dtype,         a.tokens,        a.in_features,       a.out_features,
                    a.input_stride, a.weight_stride, a.output_stride, a.bias != nullptr, a.accumulate};
  auto plan = plans.by_shape.find(shape);
  if (plan == plans.by_shape.end()) {
    plan = plans.by_shape.try_emplace(shape, lt, plans.handle, a).first;
  }
  return plan->second.run(plans.handle, a, context);
}

}  // namespace kv
