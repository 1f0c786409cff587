#include "runtime/host-bells.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/device.h"
#include "runtime/isa.h"
#include "tests/check.h"

using namespace kv;

namespace {

// A device that rings, and the host that answers.
struct Ringing {
  std::shared_ptr<Device> device = create_cpu_device(2, Isa::baseline, 0);
  std::shared_ptr<HostFailure> failure = std::make_shared<HostFailure>(std::make_shared<HostFailure::Flag>(0));
  std::shared_ptr<HostBells> bells = std::make_shared<HostBells>(
      std::shared_ptr<HostBell>(new HostBell[HostBells::kCount], std::default_delete<HostBell[]>()));

  HostTask task(HostPart part) { return HostTask(*device, failure, "test", std::move(part)); }

  // What a kernel does.
  static void ring(HostBell& bell, HostTask& task) {
    bell.task.store(&task, std::memory_order_release);
    while (bell.task.load(std::memory_order_acquire) != nullptr) std::this_thread::yield();
  }
};

}  // namespace

TEST("a host task that rings sees what the device wrote, and the device what it wrote") {
  Ringing ringing;
  int counted = 0;
  HostTask task = ringing.task([&](HostContext& host) {
    std::atomic<int> shares{0};
    host.workers.for_each(8, [&](size_t, int) { ++shares; });
    counted += shares;
    return Status::success();
  });
  const std::shared_ptr<HostBell> bell = ringing.bells->take();
  for (int round = 1; round <= 300; ++round) {
    counted += 1;
    ringing.bells->expect(1);
    Ringing::ring(*bell, task);
    CHECK(counted == 9 * round);
  }
}

TEST("tasks of several bells run one at a time, late ones too") {
  Ringing ringing;
  std::atomic<int> inside{0};
  std::atomic<int> together{0};
  std::atomic<int> runs{0};
  std::vector<std::thread> devices;
  for (int i = 0; i < 4; ++i) {
    devices.emplace_back([&, i] {
      const std::shared_ptr<HostBell> bell = ringing.bells->take();
      HostTask task = ringing.task([&](HostContext&) {
        if (++inside > 1) ++together;
        std::this_thread::yield();
        --inside;
        ++runs;
        return Status::success();
      });
      for (int round = 0; round < 50; ++round) {
        ringing.bells->expect(1);
        if (round % 20 == i) std::this_thread::sleep_for(std::chrono::milliseconds(3));
        Ringing::ring(*bell, task);
      }
    });
  }
  for (std::thread& device : devices) device.join();
  CHECK(runs == 200 && together == 0);
}

TEST("a task that throws is answered, and those behind it are skipped") {
  Ringing ringing;
  int runs = 0;
  HostTask task = ringing.task([&](HostContext&) -> Status {
    ++runs;
    throw std::runtime_error("row 3 is missing");
  });
  const std::shared_ptr<HostBell> bell = ringing.bells->take();
  for (int round = 0; round < 3; ++round) {
    ringing.bells->expect(1);
    Ringing::ring(*bell, task);
  }
  CHECK(runs == 1 && ringing.failure->status().message == "row 3 is missing");
}

TEST("bells are taken once, given back, and end while tasks are expected that never ring") {
  Ringing ringing;
  std::vector<std::shared_ptr<HostBell>> all;
  for (size_t i = 0; i < HostBells::kCount; ++i) all.push_back(ringing.bells->take());
  CHECK(all.back() != nullptr && all.front() != all.back() && ringing.bells->take() == nullptr);
  HostBell* const last = all.back().get();
  all.pop_back();
  CHECK(ringing.bells->take().get() == last);
  ringing.bells->expect(3);
  ringing.bells->expect(-1);
}
