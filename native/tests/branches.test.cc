#include <atomic>
#include <memory>
#include <vector>

#include "tests/check.h"
#include "tests/deferred-device.h"

using namespace kv;
using namespace kv::tests;

TEST("a stream that waits for one that records is recorded beside it, and joined again") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    Stream stream(device);
    Stream side(device);
    std::atomic<int> input{0};
    int left = 0;
    int right = 0;
    int sum = 0;
    stream.begin_recording();
    stream.enqueue(operation("count", [&] { ++input; }));
    side.wait_for(stream);
    side.enqueue(operation("square", [&] { right = input * input; }));
    stream.enqueue(operation("double", [&] { left = 2 * input; }));
    stream.wait_for(side);
    stream.enqueue(operation("add", [&] { sum = left + right; }));
    CHECK(side.recording());
    const std::shared_ptr<Recording> recording = stream.end_recording();
    CHECK(!side.recording() && !stream.recording());
    CHECK(recording->joined());
    CHECK(reached(stream).ok() && reached(side).ok() && input == 0);
    for (int round = 1; round <= 5; ++round) {
      stream.replay(recording);
      CHECK(reached(stream).ok());
      CHECK(sum == 2 * round + round * round);
    }
    // The side stream is its own again.
    side.enqueue(operation("reset", [&] { input = 0; }));
    CHECK(reached(side).ok() && input == 0);
  }
}

TEST("branches run beside each other, each as late as it likes, and only a join orders them") {
  auto device = std::make_shared<DeferredDevice>();
  Stream stream(device);
  Stream side(device);
  std::atomic<int> met{0};
  std::vector<int> order;
  // Neither gets past this alone.
  const auto meet = [&met] {
    const int wanted = (++met + 1) / 2 * 2;
    while (met < wanted) std::this_thread::yield();
  };
  for (const bool late_side : {true, false}) {
    stream.begin_recording();
    side.wait_for(stream);
    const Work late = [] { std::this_thread::sleep_for(std::chrono::milliseconds(10)); };
    if (late_side) side.enqueue(operation("late", late));
    side.enqueue(operation("meet", meet));
    side.enqueue(operation("append", [&] { order.push_back(1); }));
    if (!late_side) stream.enqueue(operation("late", late));
    stream.enqueue(operation("meet", meet));
    stream.wait_for(side);
    stream.enqueue(operation("append", [&] { order.push_back(2); }));
    const std::shared_ptr<Recording> recording = stream.end_recording();
    for (int round = 0; round < 4; ++round) stream.replay(recording);
    CHECK(reached(stream).ok());
    CHECK((order == std::vector<int>{1, 2, 1, 2, 1, 2, 1, 2}));
    order.clear();
  }
}

TEST("a fault on a branch is the stream's, with its operation's name") {
  auto device = std::make_shared<DeferredDevice>();
  Stream stream(device);
  Stream side(device);
  std::atomic<bool> fails{false};
  stream.begin_recording();
  side.wait_for(stream);
  side.enqueue({"score", {}, [&](ExecutionContext& context) {
    auto* queue = static_cast<DeferredQueue*>(context.queue);
    queue->put([&fails, queue] {
      if (fails) queue->report("score", 3);
    });
    return Status::success();
  }});
  stream.wait_for(side);
  const std::shared_ptr<Recording> recording = stream.end_recording();
  for (int round = 0; round < 3; ++round) stream.replay(recording);
  CHECK(reached(stream).ok());
  fails = true;
  stream.replay(recording);
  CHECK(reached(stream).message.rfind("score: ", 0) == 0);
  CHECK(reached(side).ok());
}

TEST("a branch that nobody waits for is found, also behind another branch") {
  const std::shared_ptr<Device> device = create_cpu_device(1, Isa::baseline, 1 << 20);
  Stream stream(device);
  Stream side(device);
  Stream far(device);
  const auto ends = [&](auto record) {
    stream.begin_recording();
    record();
    return stream.end_recording()->joined();
  };
  const auto work = [] { return operation("work", [] {}); };
  CHECK(ends([] {}));
  CHECK(!ends([&] { side.wait_for(stream); }));
  CHECK(ends([&] {
    side.wait_for(stream);
    stream.wait_for(side);
  }));
  CHECK(!ends([&] {
    side.wait_for(stream);
    stream.wait_for(side);
    side.enqueue(work());
  }));
  CHECK(ends([&] {
    side.wait_for(stream);
    far.wait_for(side);
    far.enqueue(work());
    side.wait_for(far);
    stream.wait_for(side);
  }));
  CHECK(!ends([&] {
    side.wait_for(stream);
    far.wait_for(side);
    stream.wait_for(side);
    far.enqueue(work());
    side.wait_for(far);
  }));
}

TEST("only streams of one recording wait for each other while it is made") {
  const std::shared_ptr<Device> device = create_cpu_device(1, Isa::baseline, 1 << 20);
  Stream stream(device);
  Stream side(device);
  Stream other(device);
  stream.begin_recording();
  CHECK(!stream.can_wait_for(other));
  CHECK(other.can_wait_for(side));
  side.wait_for(stream);
  CHECK(stream.can_wait_for(side) && side.can_wait_for(stream) && !side.can_wait_for(other));
  other.begin_recording();
  CHECK(!stream.can_wait_for(other) && !other.can_wait_for(stream));
  side.leave_recording();
  CHECK(stream.recording() && !side.recording());
  stream.leave_recording();
  CHECK(!stream.recording() && other.recording());
}
