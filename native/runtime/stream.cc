#include "runtime/stream.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <string>
#include <utility>

namespace kv {
namespace {

// How long the thread sleeps between two looks at work in progress.
constexpr auto kPoll = std::chrono::microseconds(20);

std::shared_ptr<Queue> queue_of(Device& device) {
  std::shared_ptr<Queue> queue = device.create_queue();
  if (queue == nullptr) throw std::bad_alloc();
  return queue;
}

void add_once(std::vector<const char*>& names, const char* name) {
  if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
}

Status named(const Status& status, const std::vector<const char*>& suspects) {
  std::string culprit;
  for (const char* name : suspects) culprit += (culprit.empty() ? "" : ", ") + std::string(name);
  if (status.operation != nullptr) culprit = status.operation;
  return Status::failure(status.code, culprit + ": " + status.message);
}

}  // namespace

Stream::Stream(std::shared_ptr<Device> device)
    : device_(std::move(device)), launched_(queue_of(*device_)), thread_(&Stream::thread_main, this) {}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Stream::enqueue(Operation operation) {
  if (recording_ != nullptr) {
    recording_->operations.push_back(std::move(operation));
  } else {
    push({Kind::operation, std::move(operation), nullptr, nullptr, {}});
  }
}

void Stream::replay(std::shared_ptr<Recording> recording) {
  push({Kind::replay, {}, std::move(recording), nullptr, {}});
}

void Stream::release(std::shared_ptr<Recording> recording) {
  push({Kind::release, {}, std::move(recording), nullptr, {}});
}

void Stream::notify(Notification notification) {
  push({Kind::notification, {}, nullptr, std::move(notification), {}});
}

void Stream::wait_for(Stream& other) {
  auto reached = std::make_shared<std::promise<Status>>();
  push({Kind::wait, {}, nullptr, nullptr, reached->get_future()});
  other.notify([reached](const Status& status) { reached->set_value(status); });
}

void Stream::push(Entry entry) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(entry));
  }
  wake_.notify_one();
}

void Stream::run(const Operation& operation) {
  Status status;
  if (device_->kind() != DeviceKind::cpu) {
    add_once(unconfirmed_, operation.name);
    for (const std::shared_ptr<Storage>& storage : operation.holds) {
      if (status.ok()) status = storage->used_on(launched_);
    }
  }
  if (status.ok()) status = launch(operation);
  if (!status.ok()) fail(status, operation.name);
}

void Stream::replay_now(Recording& recording) {
  if (recording.graph == nullptr && recording.ran) {
    const char* current = "replay";
    const auto launch_all = [&] {
      Status status;
      for (const Operation& operation : recording.operations) {
        current = operation.name;
        status = launch(operation);
        if (!status.ok()) return status;
      }
      current = "replay";
      return status;
    };
    const Status status = launched_->capture(launch_all, recording.graph);
    if (!status.ok()) return fail(status, current);
  }
  if (recording.graph != nullptr) {
    for (const Operation& operation : recording.operations) add_once(unconfirmed_, operation.name);
    const Status status = recording.graph->launch();
    if (!status.ok()) fail(status, "replay");
    return;
  }
  for (const Operation& operation : recording.operations) {
    if (failure_.ok()) run(operation);
  }
  recording.ran = true;
}

Status Stream::launch(const Operation& operation) {
  ExecutionContext context{device_->workers(), device_->isa(),  device_->kind(),
                           launched_->cuda_stream(), device_.get(), launched_.get(), {launched_->fault(), operation.name}};
  std::lock_guard<std::mutex> turn(device_->turn());
  try {
    return operation.launch(context);
  } catch (const std::bad_alloc&) {
    return Status::failure(StatusCode::out_of_memory, "its working memory could not be allocated");
  } catch (const std::exception& error) {
    return Status::failure(StatusCode::device_fault, error.what());
  }
}

void Stream::await(Notification notification) {
  std::unique_ptr<Moment> moment = launched_->mark();
  if (moment == nullptr) return notification(failure_);
  awaited_.push_back({std::move(moment), std::move(notification), failure_, std::exchange(unconfirmed_, {})});
}

void Stream::settle(bool all) {
  while (!awaited_.empty()) {
    Awaited& first = awaited_.front();
    const std::optional<Status> outcome = all ? first.moment->wait() : first.moment->poll();
    if (!outcome.has_value()) return;
    if (first.failure.ok() && !outcome->ok()) {
      failure_ = named(*outcome, first.operations);
      for (Awaited& later : awaited_) later.failure = failure_;
    }
    first.notification(first.failure);
    awaited_.pop_front();
  }
}

// A device that runs what it is given later reports its own fault at any later call, and not of which operation.
void Stream::fail(const Status& status, const char* operation) {
  std::vector<const char*> suspects;
  if (status.code == StatusCode::device_fault) {
    for (const Awaited& awaited : awaited_) {
      for (const char* name : awaited.operations) add_once(suspects, name);
    }
    for (const char* name : unconfirmed_) add_once(suspects, name);
  }
  if (suspects.empty()) suspects.push_back(operation);
  failure_ = named(status, suspects);
}

void Stream::process(Entry& entry) {
  switch (entry.kind) {
    case Kind::notification:
      return await(std::move(entry.notification));
    case Kind::wait: {
      // The other stream may wait for a notification of this one.
      settle(true);
      const Status status = entry.reached.get();
      if (failure_.ok() && !status.ok()) fail(status, "waitFor");
      return;
    }
    case Kind::operation:
      if (failure_.ok()) run(entry.operation);
      return;
    case Kind::replay:
      if (failure_.ok()) replay_now(*entry.recording);
      return;
    case Kind::release:
      return;
  }
}

bool Stream::next(Entry& entry) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (queue_.empty() && !stop_) {
    if (awaited_.empty()) {
      wake_.wait(lock);
      continue;
    }
    wake_.wait_for(lock, kPoll);
    lock.unlock();
    settle(false);
    lock.lock();
  }
  if (queue_.empty()) return false;
  entry = std::move(queue_.front());
  queue_.pop_front();
  if (stop_ && failure_.ok()) failure_ = Status::failure(StatusCode::device_fault, "the stream was closed");
  return true;
}

void Stream::thread_main() {
  device_->bind_thread();
  Entry entry;
  while (next(entry)) {
    process(entry);
    entry = {};
    settle(false);
  }
  settle(true);
}

}  // namespace kv
