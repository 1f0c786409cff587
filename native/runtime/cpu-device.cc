#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "runtime/device.h"

namespace kv {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;

class CpuDevice : public Device {
 public:
  using Device::Device;

  DeviceKind kind() const override { return DeviceKind::cpu; }
  std::string name() const override { return "cpu"; }
  std::shared_ptr<Queue> create_queue() override { return std::make_shared<Queue>(); }

  Status upload(void* to, const std::shared_ptr<HostMemory>& from, Queue&) override {
    return fill(to, from->data, from->bytes);
  }
  Status download(const std::shared_ptr<HostMemory>& to, const void* from, Queue&) override {
    return fill(to->data, from, to->bytes);
  }
  Status copy(void* to, const void* from, size_t bytes, Queue&) override { return fill(to, from, bytes); }

  Status fill(void* data, const void* contents, size_t bytes) override {
    if (bytes > 0) std::memmove(data, contents, bytes);
    return Status::success();
  }

 protected:
  void* allocate_memory(size_t bytes) override {
    const size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
    const size_t rounded = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    void* data = nullptr;
    if (posix_memalign(&data, alignment, rounded) != 0) return nullptr;
#if defined(MADV_HUGEPAGE)
    if (alignment == kHugePage) madvise(data, rounded, MADV_HUGEPAGE);
#endif
    return data;
  }

  void release_memory(void* data, const Queues&) override { std::free(data); }
};

}  // namespace

size_t physical_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
}

std::shared_ptr<Device> create_cpu_device(int threads, Isa isa, size_t memory_limit) {
  return std::make_shared<CpuDevice>(threads, isa, memory_limit == 0 ? physical_memory() : memory_limit);
}

}  // namespace kv
