#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/deferred-device.h"

using namespace kv;
using namespace kv::tests;

namespace {

void rest() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

// What `reader` finds in a value that `writer`, which is late, sets to 1.
int value_read(const std::shared_ptr<Device>& device, bool waits) {
  Stream writer(device);
  Stream reader(device);
  Gate gate;
  std::atomic<int> value{0};
  std::atomic<int> found{-1};
  writer.enqueue(operation("write", gate.pass([&] { value = 1; })));
  if (waits) reader.wait_for(writer);
  reader.enqueue(operation("read", [&] { found = value.load(); }));
  if (waits) {
    rest();
    CHECK(found == -1);
  } else {
    CHECK(reached(reader).ok());
  }
  gate.open();
  CHECK(reached(writer).ok() && reached(reader).ok());
  return found;
}

}  // namespace

TEST("a stream that waits runs after a late one, and would not without its wait") {
  for (const std::shared_ptr<Device>& device : both_devices()) CHECK(value_read(device, true) == 1);
  // On the CPU an operation that is late keeps others from the workers.
  CHECK(value_read(std::make_shared<DeferredDevice>(), false) == 0);
}

TEST("a stream that waits does not overwrite what a late one still reads") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    Stream reader(device);
    Stream writer(device);
    Gate gate;
    std::atomic<int> value{1};
    int found = 0;
    reader.enqueue(operation("read", gate.pass([&] { found = value; })));
    writer.wait_for(reader);
    writer.enqueue(operation("write", [&] { value = 2; }));
    rest();
    gate.open();
    CHECK(reached(reader).ok() && reached(writer).ok());
    CHECK(found == 1 && value == 2);
  }
}

TEST("where the device keeps the order, a stream that waits goes on launching") {
  auto device = std::make_shared<DeferredDevice>();
  Stream late(device);
  Stream waiting(device);
  Gate gate;
  std::promise<void> launched;
  std::atomic<bool> ran{false};
  late.enqueue(operation("late", gate.pass()));
  waiting.wait_for(late);
  waiting.enqueue({"next", {}, [&](ExecutionContext& context) {
    launched.set_value();
    return run_in_order(context, [&] { ran = true; });
  }});
  launched.get_future().wait();
  CHECK(!ran);
  gate.open();
  CHECK(reached(waiting).ok() && ran);
}

TEST("streams that wait for one another in turns come to an end, in order") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    Stream streams[] = {Stream(device), Stream(device), Stream(device)};
    std::vector<int> order;
    for (int turn = 0; turn < 300; ++turn) {
      Stream& stream = streams[turn % 3];
      if (turn > 0) stream.wait_for(streams[(turn + 2) % 3]);
      stream.enqueue(operation("append", [&order, turn] { order.push_back(turn); }));
    }
    for (Stream& stream : streams) CHECK(reached(stream).ok());
    bool ascending = order.size() == 300;
    for (size_t i = 0; i < order.size(); ++i) ascending = ascending && order[i] == static_cast<int>(i);
    CHECK(ascending);
  }
}

TEST("what fails on a stream fails those that waited for it, and not what they had done before") {
  auto device = std::make_shared<DeferredDevice>();
  Stream failing(device);
  Stream waiting(device);
  Gate gate;
  auto report = [&gate](ExecutionContext& context) {
    auto* queue = static_cast<DeferredQueue*>(context.queue);
    queue->put(gate.pass([queue] { queue->report("append", 7); }));
    return Status::success();
  };
  failing.enqueue({"append", {}, report});
  CHECK(reached(waiting).ok());
  waiting.wait_for(failing);
  waiting.enqueue(operation("next", [] {}));
  gate.open();
  const Status status = reached(waiting);
  CHECK(status.code == StatusCode::invalid_value);
  CHECK(status.message.rfind("waitFor: append: a batch entry names slot 7", 0) == 0);
  CHECK(reached(failing).message.rfind("append: ", 0) == 0);
  CHECK(reached(waiting).message == status.message);
}

TEST("what failed already is passed on by name, and later work of the other stream is not") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    Stream failing(device);
    Stream early(device);
    Stream late(device);
    early.wait_for(failing);
    failing.enqueue({"divide", {}, [](ExecutionContext&) {
      return Status::failure(StatusCode::invalid_value, "by zero");
    }});
    late.wait_for(failing);
    bool ran = false;
    late.enqueue(operation("next", [&] { ran = true; }));
    CHECK(reached(early).ok());
    CHECK(reached(late).message == "waitFor: divide: by zero");
    CHECK(!ran);
  }
}

TEST("a stream that is closed lets those go that wait for it, and says so") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    Stream waiting(device);
    std::thread opener;
    std::atomic<bool> began{false};
    Gate gate;
    {
      Stream closed(device);
      closed.enqueue({"held", {}, [&](ExecutionContext&) {
        began = true;
        gate.pass()();
        return Status::success();
      }});
      closed.enqueue(operation("never", [] {}));
      waiting.wait_for(closed);
      while (!began) std::this_thread::yield();
      opener = std::thread([&] {
        rest();
        gate.open();
      });
    }
    opener.join();
    CHECK(reached(waiting).message == "waitFor: the stream was closed");
  }
}

TEST("a stream in the place of one that failed runs behind its work, and without its failure") {
  for (const std::shared_ptr<Device>& device : both_devices()) {
    Stream failed(device);
    Stream next(device);
    Gate gate;
    std::atomic<bool> passed{false};
    bool behind = false;
    failed.enqueue(operation("late", gate.pass([&] { passed = true; })));
    failed.enqueue({"divide", {}, [](ExecutionContext&) { return Status::failure(StatusCode::invalid_value, "by zero"); }});
    next.wait_for(failed, false);
    next.enqueue(operation("next", [&] { behind = passed; }));
    gate.open();
    CHECK(!reached(failed).ok());
    failed.close();
    CHECK(reached(next).ok() && behind);
  }
}
