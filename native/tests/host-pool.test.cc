#include "runtime/host-pool.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "tests/check.h"
#include "tests/deferred-device.h"

using namespace kv;
using namespace kv::tests;

namespace {

// Whether it comes to hold within a minute, which only a busy machine takes.
bool eventually(const std::function<bool()>& holds) {
  for (int i = 0; i < 60000 && !holds(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return holds();
}

std::shared_ptr<HostPool> made_pool(const std::shared_ptr<Device>& device, size_t bytes) {
  Status status;
  std::shared_ptr<HostPool> pool = HostPool::create(device, bytes, status);
  while (pool->made() < pool->bytes() && pool->make_slab().ok()) {
  }
  return pool;
}

Operation holding(std::shared_ptr<Storage> storage, Work work) {
  Operation held = operation("use", std::move(work));
  held.holds.push_back(std::move(storage));
  return held;
}

}  // namespace

TEST("memory of someone else goes back when the device is done with it, not when the launch returns, and by itself") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    Gate gate;
    std::atomic<bool> released{false};
    bool released_early = false;
    int memory = 0;
    Stream stream(device);
    auto storage = std::make_shared<Storage>(
        device, BorrowedMemory{&memory, sizeof memory, true, nullptr, [&] { released = true; }});
    stream.enqueue(holding(std::move(storage), gate.pass([&] {
      released_early = released;
      memory = 1;
    })));
    if (device->kind() != DeviceKind::cpu) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      CHECK(!released);
    }
    gate.open();
    CHECK(eventually([&] { return released.load(); }));
    CHECK(!released_early && memory == 1);
  }
}

TEST("memory that nothing was launched on goes back at once or soon") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    std::atomic<bool> released{false};
    int memory = 0;
    Storage(device, BorrowedMemory{&memory, sizeof memory, true, nullptr, [&] { released = true; }});
    CHECK(eventually([&] { return released.load(); }));
  }
}

TEST("a device that goes waits for what is to be released") {
  Gate gate;
  std::atomic<bool> released{false};
  std::shared_ptr<Device> device = std::make_shared<DeferredDevice>();
  auto stream = std::make_unique<Stream>(device);
  int memory = 0;
  auto storage = std::make_shared<Storage>(
      device, BorrowedMemory{&memory, sizeof memory, true, nullptr, [&] { released = true; }});
  std::promise<void> launched;
  stream->enqueue({"use", {std::move(storage)}, [&](ExecutionContext& context) {
    const Status status = run_in_order(context, gate.pass());
    launched.set_value();
    return status;
  }});
  launched.get_future().wait();
  bool released_by_then = false;
  std::thread closing([&] {
    device.reset();
    stream.reset();
    released_by_then = released;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(!released);
  gate.open();
  closing.join();
  CHECK(released_by_then);
}

TEST("pieces of a pool are apart, aligned, within it, and come back when the device is done") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    Gate gate;
    Stream stream(device);
    const std::shared_ptr<HostPool> pool = made_pool(device, 1000);
    CHECK(pool->bytes() == 1024 && pool->available() == 1024 && device->memory().live == 1024);
    std::shared_ptr<Storage> first = pool->take(257);
    const std::shared_ptr<Storage> second = pool->take(512);
    CHECK(first != nullptr && second != nullptr && pool->take(1) == nullptr && pool->take(SIZE_MAX) == nullptr);
    CHECK(first->bytes() == 257 && first->on_host() && first->on_device());
    CHECK(static_cast<char*>(second->data()) - static_cast<char*>(first->data()) == 512);
    stream.enqueue(holding(std::move(first), gate.pass()));
    CHECK(pool->take(1) == nullptr);
    gate.open();
    CHECK(reached(stream).ok());
    CHECK(eventually([&] { return pool->available() == 512; }));
    CHECK(pool->take(512) != nullptr);
  }
}

TEST("a pool's memory goes when its last piece has, on whatever comes last") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    Gate gate;
    Stream stream(device);
    std::shared_ptr<HostPool> pool = made_pool(device, 1000);
    std::shared_ptr<Storage> piece = pool->take(1000);
    int* const value = static_cast<int*>(piece->data());
    pool.reset();
    stream.enqueue(holding(std::move(piece), gate.pass([value] { *value = 1; })));
    CHECK(device->memory().live == 1024);
    gate.open();
    CHECK(reached(stream).ok());
    CHECK(eventually([&] { return device->memory().live == 0; }));
  }
}

TEST("a pool is refused past the memory limit, and gives no piece before it is made") {
  const std::shared_ptr<Device> device = create_cpu_device(1, Isa::baseline, 1 << 20);
  Status status;
  CHECK(HostPool::create(device, (1 << 20) + 1, status) == nullptr);
  CHECK(status.code == StatusCode::out_of_memory && status.message.find("1048576") != std::string::npos);
  const std::shared_ptr<HostPool> pool = HostPool::create(device, 1000, status);
  CHECK(pool->take(1) == nullptr);
  CHECK(pool->make_slab().ok() && pool->take(1) != nullptr);
}
