#include "runtime/host-pool.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>

#include "tests/check.h"
#include "tests/cuda/cuda-testing.h"

using namespace kv;
using namespace kv::tests;

namespace {

constexpr size_t kMiB = size_t{1} << 20;

bool soon(const std::function<bool()>& holds) {
  for (int i = 0; i < 2000 && !holds(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return holds();
}

std::shared_ptr<HostPool> made_pool(const std::shared_ptr<Device>& device, size_t bytes) {
  Status status;
  std::shared_ptr<HostPool> pool = HostPool::create(device, bytes, status);
  if (pool == nullptr) throw std::runtime_error(status.message);
  while (pool->made() < pool->bytes()) {
    status = pool->make_slab();
    if (!status.ok()) throw std::runtime_error(status.message);
  }
  return pool;
}

Operation holding(std::shared_ptr<Storage> storage, Operation operation) {
  operation.holds.push_back(std::move(storage));
  return operation;
}

}  // namespace

TEST("a pool is pinned slab by slab, counted, and given back") {
  const std::shared_ptr<Device> device = cuda_device();
  const size_t before = device->memory().pinned;
  const auto start = std::chrono::steady_clock::now();
  std::shared_ptr<HostPool> pool = made_pool(device, 1024 * kMiB);
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
  std::printf("     1 GiB pinned in %.0f ms\n", taken.count());
  CHECK(device->memory().pinned == before + 1024 * kMiB);
  pool.reset();
  CHECK(soon([&] { return device->memory().pinned == before; }));
  Status status;
  CHECK(HostPool::create(device, size_t{1} << 50, status) == nullptr);
  CHECK(status.code == StatusCode::out_of_memory && device->memory().pinned == before);
}

TEST("kernels and copies reach a pool by address, over the borders of its slabs, recorded or not") {
  const std::shared_ptr<Device> device = cuda_device();
  Stream stream(device);
  const std::shared_ptr<HostPool> pool = made_pool(device, 200 * kMiB);
  const std::shared_ptr<Storage> whole = pool->take(200 * kMiB);
  const size_t count = 200 * kMiB / sizeof(int);
  int* const values = static_cast<int*>(whole->data());
  const std::shared_ptr<Storage> there = Storage::allocate(device, 200 * kMiB);
  int* const copied = static_cast<int*>(there->data());
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<int>(i);
  const auto copy_there = [=](ExecutionContext& context) {
    return context.owner->upload(copied, HostMemory::borrow(values, 200 * kMiB, true), *context.queue);
  };
  const auto copy_back = [=](ExecutionContext& context) {
    return context.owner->download(HostMemory::borrow(values, 200 * kMiB, true), copied, *context.queue);
  };
  const size_t border = HostRange::kSlabBytes / sizeof(int);
  const auto increment = [=] __device__() {
    for (size_t i = border - 8; i < border + 8; ++i) {
      values[i] += 1;
      copied[i] += values[i];
    }
  };
  for (const bool recorded : {false, true}) {
    if (recorded) stream.begin_recording();
    stream.enqueue({"upload", {whole, there}, copy_there});
    stream.enqueue(device_operation("increment", increment));
    stream.enqueue({"download", {whole, there}, copy_back});
    if (recorded) {
      const std::shared_ptr<Recording> recording = stream.end_recording();
      for (int round = 0; round < 3; ++round) stream.replay(recording);
      CHECK(reached(stream).ok() && recording->graph != nullptr);
    }
    CHECK(reached(stream).ok());
    // Of x, x + (x + 1) comes back.
    bool right = true;
    for (size_t i = 0; i < count; ++i) {
      int64_t wanted = static_cast<int64_t>(i);
      if (i >= border - 8 && i < border + 8) {
        for (int round = 0; round < (recorded ? 4 : 1); ++round) wanted = 2 * wanted + 1;
      }
      right = right && values[i] == static_cast<int>(wanted);
    }
    CHECK(right);
  }
}

TEST("a piece comes back when the device is done with it, and wrapped memory does, not before") {
  const std::shared_ptr<Device> device = cuda_device();
  Stream stream(device);
  Shared gate;
  int* const opened = gate.data();
  const std::shared_ptr<HostPool> pool = made_pool(device, 256);
  std::shared_ptr<Storage> piece = pool->take(256);
  int memory = 0;
  std::atomic<bool> released{false};
  auto wrapped = std::make_shared<Storage>(
      device, BorrowedMemory{&memory, sizeof memory, true, nullptr, [&] { released = true; }});
  stream.enqueue(holding(std::move(piece), device_operation("late", [=] __device__() { wait_until(opened, 1); })));
  stream.enqueue(holding(std::move(wrapped), host_operation("host", [&memory](HostContext&) {
    memory = 1;
    return Status::success();
  })));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(pool->available() == 0 && !released);
  gate[0] = 1;
  CHECK(soon([&] { return pool->available() == 256 && released; }));
  CHECK(memory == 1);
  CHECK(reached(stream).ok());
}

TEST("a device and its streams may go while memory waits for them") {
  std::shared_ptr<Device> device = cuda_device();
  auto stream = std::make_unique<Stream>(device);
  Shared gate;
  int* const opened = gate.data();
  std::shared_ptr<HostPool> pool = made_pool(device, 100 * kMiB);
  std::shared_ptr<Storage> piece = pool->take(100 * kMiB);
  int memory = 0;
  std::atomic<bool> released{false};
  auto wrapped = std::make_shared<Storage>(
      device, BorrowedMemory{&memory, sizeof memory, true, nullptr, [&] { released = true; }});
  Operation late = device_operation("late", [=] __device__() { wait_until(opened, 1); });
  late.holds = {std::move(piece), std::move(wrapped)};
  stream->enqueue(std::move(late));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::thread closing([&] {
    pool.reset();
    stream.reset();
    device.reset();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!released);
  gate[0] = 1;
  closing.join();
  CHECK(released);
}
