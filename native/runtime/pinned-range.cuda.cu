#include "runtime/pinned-range.h"

#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <string>
#include <utility>

namespace kv {
namespace {

Status refused(size_t bytes, const std::string& why) {
  return Status::failure(StatusCode::out_of_memory, std::to_string(bytes) + " bytes of pinned memory were asked for; " + why);
}

// Reserves addresses that begin at a multiple of a slab, because copies are cut at such multiples. Null when the
// process has no addresses left.
char* reserve(size_t bytes) {
  const size_t room = bytes + HostRange::kSlabBytes;
  void* mapped = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(mapped);
  const size_t ahead = (HostRange::kSlabBytes - reinterpret_cast<size_t>(begin) % HostRange::kSlabBytes) % HostRange::kSlabBytes;
  if (ahead > 0) munmap(begin, ahead);
  const size_t pages = (bytes + 4095) / 4096 * 4096;
  if (room - ahead > pages) munmap(begin + ahead + pages, room - ahead - pages);
  return begin + ahead;
}

}  // namespace

std::shared_ptr<PinnedRange> PinnedRange::create(size_t bytes, std::shared_ptr<std::atomic<size_t>> pinned,
                                                 Status& status) {
  rlimit lock{};
  const bool limited = getrlimit(RLIMIT_MEMLOCK, &lock) == 0 && lock.rlim_cur != RLIM_INFINITY;
  const size_t taken = pinned->fetch_add(bytes);
  char* addresses = nullptr;
  if (limited && taken + bytes > lock.rlim_cur) {
    status = refused(bytes, "the process may lock " + std::to_string(lock.rlim_cur) + " (ulimit -l), of which " +
                                std::to_string(taken) + " are taken. Ask for less, or raise the limit.");
  } else if ((addresses = reserve(bytes)) == nullptr) {
    status = refused(bytes, "the process has no addresses for them. Ask for less.");
  }
  if (addresses != nullptr) return std::make_shared<PinnedRange>(addresses, bytes, std::move(pinned));
  pinned->fetch_sub(bytes);
  return nullptr;
}

PinnedRange::PinnedRange(char* addresses, size_t size, std::shared_ptr<std::atomic<size_t>> pinned)
    : HostRange(addresses, size), pinned_(std::move(pinned)) {}

PinnedRange::~PinnedRange() {
  for (size_t offset = 0; offset < made_; offset += kSlabBytes) {
    cudaHostUnregister(data + offset);
    munmap(data + offset, std::min(kSlabBytes, bytes - offset));
  }
  if (made_ < bytes) munmap(data + made_, bytes - made_);
  pinned_->fetch_sub(bytes);
}

Status PinnedRange::make(size_t offset, size_t slab_bytes) {
  // Large pages are pinned several times as fast as small ones.
  madvise(data + offset, slab_bytes, MADV_HUGEPAGE);
  const cudaError_t result = cudaHostRegister(data + offset, slab_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (result != cudaSuccess) {
    cudaGetLastError();
    return refused(bytes, std::to_string(made_) + " could be pinned: " + cudaGetErrorString(result) + ". Ask for less.");
  }
  made_ += slab_bytes;
  return Status::success();
}

}  // namespace kv
