#include "runtime/pinned-memory.cuda.h"

#include <algorithm>
#include <utility>

namespace kv {
namespace {

char* pin(size_t bytes) {
  void* memory = nullptr;
  if (cudaHostAlloc(&memory, bytes, cudaHostAllocPortable) == cudaSuccess) return static_cast<char*>(memory);
  cudaGetLastError();
  return nullptr;
}

}  // namespace

PinnedMemory::PinnedMemory()
    : memory_(pin(kSlabs * kSlabBytes)), slabs_(memory_, kSlabBytes, memory_ == nullptr ? 0 : kSlabs) {}

PinnedMemory::~PinnedMemory() {
  if (memory_ != nullptr) cudaFreeHost(memory_);
}

std::shared_ptr<HostMemory> PinnedMemory::take(size_t bytes) {
  char* data = slabs_.take(bytes);
  if (data == nullptr) {
    let_go_of_done();
    data = slabs_.take(bytes);
  }
  if (data == nullptr) return nullptr;
  return std::shared_ptr<HostMemory>(new HostMemory{data, bytes, true},
                                     [self = shared_from_this()](HostMemory* memory) {
                                       self->slabs_.give_back(memory->data);
                                       delete memory;
                                     });
}

void PinnedMemory::hold(std::shared_ptr<HostMemory> memory, cudaStream_t stream) {
  cudaEvent_t done = nullptr;
  if (cudaEventCreateWithFlags(&done, cudaEventDisableTiming) != cudaSuccess ||
      cudaEventRecord(done, stream) != cudaSuccess) {
    cudaStreamSynchronize(stream);
    if (done != nullptr) cudaEventDestroy(done);
    return;
  }
  let_go_of_done();
  std::lock_guard<std::mutex> lock(mutex_);
  copies_.push_back({std::move(memory), done});
}

void PinnedMemory::let_go_of_done() {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto done = [](const Copy& copy) {
    if (cudaEventQuery(copy.done) == cudaErrorNotReady) return false;
    cudaEventDestroy(copy.done);
    return true;
  };
  copies_.erase(std::remove_if(copies_.begin(), copies_.end(), done), copies_.end());
}

void PinnedMemory::drain() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Copy& copy : copies_) {
    cudaEventSynchronize(copy.done);
    cudaEventDestroy(copy.done);
  }
  copies_.clear();
}

}  // namespace kv
