// Operations that a stream collects once and can replay any number of times.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "runtime/device.h"
#include "runtime/operation.h"

namespace kv {

// A step of one branch of a recording: an operation, or a wait for all earlier steps of another branch.
struct RecordedStep {
  size_t branch = 0;
  Operation operation;
  std::optional<size_t> awaited;  // the branch to wait for; this step has no operation then
};

struct Recording {
  // In the order in which the steps were enqueued. Running them one by one in this order is always correct.
  std::vector<RecordedStep> steps;
  // Branch 0 is the recording stream. Each other branch is a stream that waited for a branch of this recording.
  size_t branches = 1;
  bool open = true;  // whether streams may still add steps
  // Whether the steps have run one by one. Working memory and lazily loaded code are in place after that, which a
  // capture needs.
  bool ran = false;
  // The queues of branches 1 and up, made for the first replay. A null queue means that the stream's own queue runs
  // the branch.
  Queues queues;
  // The captured graph of all steps, if the queue has graphs.
  std::unique_ptr<Graph> graph;

  // Whether every step of every branch comes before the end of the recording stream's own order.
  bool joined() const {
    std::vector<bool> awaited(branches, false);
    awaited[0] = true;
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
      if (!awaited[step->branch]) return false;
      if (step->awaited.has_value()) awaited[*step->awaited] = true;
    }
    return true;
  }
};

}  // namespace kv
