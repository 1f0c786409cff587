#include <atomic>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/cuda/cuda-testing.h"

using namespace kv;
using namespace kv::tests;

namespace {

// The device counts, the host sums on the device's workers, the device doubles.
struct ThreeParts {
  Shared memory{3};
  std::vector<int> shares = std::vector<int>(64);

  Operation operation(std::function<void()> before_host = [] {}) {
    return {"threeParts", {}, [this, before_host](ExecutionContext& context) {
      int* const counted = memory.data();
      int* const sum = counted + 1;
      int* const result = counted + 2;
      Status status = run_on_device(context, [=] __device__() { ++*counted; });
      const auto host_part = [this, before_host, counted, sum](HostContext& host) {
        before_host();
        host.workers.for_each(shares.size(), [this, counted](size_t index, int) { shares[index] = *counted; });
        *sum = std::accumulate(shares.begin(), shares.end(), 0);
        return Status::success();
      };
      if (status.ok()) status = context.queue->run_on_host(host_part, context);
      if (!status.ok()) return status;
      return run_on_device(context, [=] __device__() { *result = 2 * *static_cast<volatile int*>(sum); });
    }};
  }
  int result() { return memory[2]; }
};

}  // namespace

TEST("a host part runs between the parts of the device, recorded or not") {
  const std::shared_ptr<Device> device = cuda_device();
  ThreeParts parts;
  Stream stream(device);
  stream.enqueue(parts.operation());
  CHECK(reached(stream).ok() && parts.result() == 2 * 64);
  stream.begin_recording();
  stream.enqueue(parts.operation());
  stream.enqueue(parts.operation());
  const std::shared_ptr<Recording> recording = stream.end_recording();
  for (int round = 0; round < 100; ++round) stream.replay(recording);
  CHECK(reached(stream).ok() && parts.result() == 2 * 64 * 201);
  CHECK(recording->graph != nullptr);
}

TEST("a slow host part keeps no other stream from launching, nor the device from running it") {
  const std::shared_ptr<Device> device = cuda_device();
  ThreeParts parts;
  Shared ran;
  int* const count = ran.data();
  Stream slow(device);
  Stream other(device);
  std::promise<void> gate;
  slow.enqueue(parts.operation([&] { gate.get_future().wait(); }));
  for (int i = 0; i < 100; ++i) other.enqueue(device_operation("count", [=] __device__() { ++*count; }));
  CHECK(reached(other).ok() && ran[0] == 100);
  CHECK(parts.result() == 0);
  gate.set_value();
  CHECK(reached(slow).ok() && parts.result() == 2 * 64);
}

TEST("a host part that fails is its operation's fault; those behind it are skipped, earlier waits are not") {
  const std::shared_ptr<Device> device = cuda_device();
  for (const bool recorded : {false, true}) {
    Stream stream(device);
    std::atomic<int> runs{0};
    if (recorded) stream.begin_recording();
    stream.enqueue(host_operation("fetch", [&](HostContext&) -> Status {
      if (++runs == (recorded ? 5 : 1)) throw std::runtime_error("block 5 is gone");
      return Status::success();
    }));
    if (recorded) {
      const std::shared_ptr<Recording> recording = stream.end_recording();
      for (int round = 0; round < 4; ++round) stream.replay(recording);
      Status before = Status::failure(StatusCode::device_fault, "");
      stream.notify([&](const Status& status) { before = status; });
      for (int round = 0; round < 4; ++round) stream.replay(recording);
      CHECK(reached(stream).message == "fetch: block 5 is gone");
      CHECK(before.ok() && runs == 5);
    } else {
      stream.enqueue(host_operation("after", [&](HostContext&) {
        ++runs;
        return Status::success();
      }));
      CHECK(reached(stream).message == "fetch: block 5 is gone");
      CHECK(runs == 1);
    }
  }
}

TEST("a stream that is closed waits for the host part that runs, and its device may be gone by then") {
  std::shared_ptr<Device> device = cuda_device();
  std::promise<void> gate;
  std::atomic<bool> began{false};
  std::atomic<int> indices{0};
  std::atomic<int> others{0};
  auto stream = std::make_unique<Stream>(device);
  stream->enqueue(host_operation("running", [&](HostContext& host) {
    began = true;
    gate.get_future().wait();
    host.workers.for_each(64, [&](size_t, int) { ++indices; });
    return Status::success();
  }));
  for (int i = 0; i < 10; ++i) {
    stream->enqueue(host_operation("waiting", [&](HostContext&) {
      ++others;
      return Status::success();
    }));
  }
  while (!began) std::this_thread::yield();
  device.reset();
  std::thread closing([&] { stream.reset(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  gate.set_value();
  closing.join();
  CHECK(indices == 64 && others == 0);
}

TEST("a host part on a branch runs beside the stream's own work") {
  const std::shared_ptr<Device> device = cuda_device();
  Stream stream(device);
  Stream side(device);
  Shared memory(2);
  int* const from_host = memory.data();
  int* const from_device = from_host + 1;
  stream.begin_recording();
  side.wait_for(stream);
  side.enqueue(host_operation("host", [&](HostContext&) {
    memory[0] = memory[0] + 1;
    return Status::success();
  }));
  // It waits for the branch: one after the other, this way round, they would not come to an end.
  stream.enqueue(device_operation("device", [=] __device__() {
    const int round = ++*from_device;
    wait_until(from_host, round);
  }));
  stream.wait_for(side);
  const std::shared_ptr<Recording> recording = stream.end_recording();
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; round < 5; ++round) stream.replay(recording);
  CHECK(reached(stream).ok() && memory[0] == 5 && memory[1] == 5);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(4));
}

TEST("the round trip of an empty host part in a graph is measured") {
  const std::shared_ptr<Device> device = cuda_device();
  Stream stream(device);
  constexpr int kLayers = 32;
  stream.begin_recording();
  for (int layer = 0; layer < kLayers; ++layer) {
    stream.enqueue(device_operation("before", [] __device__() {}));
    stream.enqueue(host_operation("host", [](HostContext&) { return Status::success(); }));
    stream.enqueue(device_operation("after", [] __device__() {}));
  }
  const std::shared_ptr<Recording> recording = stream.end_recording();
  for (int round = 0; round < 10; ++round) stream.replay(recording);
  CHECK(reached(stream).ok());
  constexpr int kRounds = 50;
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; round < kRounds; ++round) stream.replay(recording);
  CHECK(reached(stream).ok());
  const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - start;
  std::printf("     %.1f us a layer of two kernels around an empty host part\n", taken.count() / kRounds / kLayers);
}
