#include <atomic>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/deferred-device.h"

using namespace kv;
using namespace kv::tests;

namespace {

// An operation of three parts: the device counts, the host sums on the device's workers, the device doubles.
struct ThreeParts {
  int counted = 0;
  std::vector<int> shares = std::vector<int>(64);
  int result = 0;

  Operation operation(const Work& before_host = [] {}) {
    return {"threeParts", {}, [this, before_host](ExecutionContext& context) {
      Status status = run_in_order(context, [this] { ++counted; });
      const auto host_part = [this, before_host](HostContext& host) {
        before_host();
        host.workers.for_each(shares.size(), [this](size_t index, int) { shares[index] = counted; });
        return Status::success();
      };
      if (status.ok()) status = context.queue->run_on_host(host_part, context);
      if (!status.ok()) return status;
      return run_in_order(context, [this] { result = 2 * std::accumulate(shares.begin(), shares.end(), 0); });
    }};
  }
};

Operation host_operation(const char* name, HostPart part) {
  return {name, {}, [part](ExecutionContext& context) { return context.queue->run_on_host(part, context); }};
}

}  // namespace

TEST("a host part runs on the workers between the parts of the device, recorded or not") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    Stream stream(device);
    ThreeParts parts;
    stream.enqueue(parts.operation());
    CHECK(reached(stream).ok() && parts.result == 2 * 64);
    stream.begin_recording();
    stream.enqueue(parts.operation());
    stream.enqueue(parts.operation());
    const std::shared_ptr<Recording> recording = stream.end_recording();
    for (int round = 0; round < 4; ++round) stream.replay(recording);
    CHECK(reached(stream).ok() && parts.result == 2 * 64 * 9);
  }
}

TEST("a slow host part keeps no other stream from launching, nor the device from running it") {
  auto device = std::make_shared<DeferredDevice>();
  Stream slow(device);
  Stream other(device);
  Gate gate;
  ThreeParts parts;
  slow.enqueue(parts.operation(gate.pass()));
  int ran = 0;
  for (int i = 0; i < 100; ++i) other.enqueue(operation("count", [&] { ++ran; }));
  CHECK(reached(other).ok() && ran == 100);
  CHECK(parts.result == 0);
  gate.open();
  CHECK(reached(slow).ok() && parts.result == 2 * 64);
}

TEST("host parts of several streams take turns on the workers") {
  auto device = std::make_shared<DeferredDevice>();
  std::atomic<int> inside{0};
  std::atomic<int> together{0};
  const HostPart part = [&](HostContext& host) {
    if (++inside > 1) ++together;
    host.workers.for_each(8, [](size_t, int) { std::this_thread::yield(); });
    --inside;
    return Status::success();
  };
  Stream first(device);
  Stream second(device);
  for (int i = 0; i < 200; ++i) {
    first.enqueue(host_operation("first", part));
    second.enqueue(host_operation("second", part));
  }
  CHECK(reached(first).ok() && reached(second).ok());
  CHECK(together == 0);
}

TEST("a host part that fails or throws is its operation's fault; those behind it are skipped, earlier waits are not") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    for (const bool throws : {false, true}) {
      Stream stream(device);
      Gate gate;
      bool ran = false;
      Status before;
      stream.enqueue(host_operation("well", [](HostContext&) { return Status::success(); }));
      stream.notify([&](const Status& status) { before = status; });
      stream.enqueue(host_operation("sum", [&](HostContext&) -> Status {
        gate.pass()();
        if (throws) throw std::runtime_error("row 3 is missing");
        return Status::failure(StatusCode::invalid_value, "row 3 is missing");
      }));
      stream.enqueue(host_operation("after", [&](HostContext&) {
        ran = true;
        return Status::success();
      }));
      gate.open();
      for (int i = 0; i < 2; ++i) {
        const Status status = reached(stream);
        CHECK(status.message == "sum: row 3 is missing");
        CHECK(status.code == (throws ? StatusCode::device_fault : StatusCode::invalid_value));
      }
      CHECK(before.ok() && !ran);
    }
  }
}

TEST("a host part that fails in a recording, beside it too, fails the stream that replays") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    Stream stream(device);
    Stream side(device);
    std::atomic<int> runs{0};
    stream.begin_recording();
    side.wait_for(stream);
    side.enqueue(host_operation("fetch", [&](HostContext&) {
      return ++runs < 5 ? Status::success() : Status::failure(StatusCode::invalid_value, "block 5 is gone");
    }));
    stream.wait_for(side);
    const std::shared_ptr<Recording> recording = stream.end_recording();
    for (int round = 0; round < 4; ++round) stream.replay(recording);
    CHECK(reached(stream).ok());
    for (int round = 0; round < 4; ++round) stream.replay(recording);
    CHECK(reached(stream).message == "fetch: block 5 is gone");
    CHECK(runs == 5);
  }
}

TEST("a stream that is closed waits for the host part that runs, and begins no other") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    Gate gate;
    std::atomic<bool> began{false};
    std::atomic<bool> ended{false};
    bool second = false;
    Status status;
    std::thread opener([&] {
      while (!began) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      gate.open();
    });
    {
      Stream stream(device);
      stream.enqueue(host_operation("running", [&](HostContext& host) {
        began = true;
        gate.pass()();
        host.workers.for_each(8, [](size_t, int) {});
        ended = true;
        return Status::success();
      }));
      stream.enqueue(host_operation("waiting", [&](HostContext&) {
        second = true;
        return Status::success();
      }));
      stream.notify([&](const Status& end) { status = end; });
      while (!began) std::this_thread::yield();
    }
    CHECK(ended && !second && !status.ok());
    opener.join();
  }
}

TEST("a device may go while a host part runs on its workers") {
  for (int kind = 0; kind < 2; ++kind) {
    std::shared_ptr<Device> device = both_devices()[kind];
    auto stream = std::make_unique<Stream>(device);
    Gate gate;
    std::atomic<bool> began{false};
    std::atomic<int> indices{0};
    stream->enqueue(host_operation("running", [&](HostContext& host) {
      began = true;
      gate.pass()();
      host.workers.for_each(64, [&](size_t, int) { ++indices; });
      return Status::success();
    }));
    while (!began) std::this_thread::yield();
    device.reset();
    std::thread closing([&] { stream.reset(); });
    gate.open();
    closing.join();
    CHECK(indices == 64);
  }
}
