// What a build without CUDA answers when it is asked for CUDA.
#include "runtime/cuda-device.h"

#ifndef KV_HAVE_CUDA

namespace kv {

CudaReport cuda_report() {
  return {false, {}, "this binary was built for the CPU only; build with KV_CUDA=on, or install the CUDA package"};
}

std::shared_ptr<Device> create_cuda_device(int, int, size_t, Status& status) {
  status = Status::failure(StatusCode::capability, cuda_report().reason);
  return nullptr;
}

}  // namespace kv

#endif
