// Operations that a stream has been told once and repeats as often as it is asked.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "runtime/device.h"
#include "runtime/operation.h"

namespace kv {

// What comes next on one branch of a recording: an operation, or a wait for all that another branch has so far.
struct RecordedStep {
  size_t branch = 0;
  Operation operation;
  std::optional<size_t> awaited;  // the other branch; there is no operation then
};

struct Recording {
  // In the order in which they were enqueued, which is one in which they may run.
  std::vector<RecordedStep> steps;
  // Branch 0 is the stream's own order. Each of the others is a stream that waited for one of the recording's.
  size_t branches = 1;
  bool open = true;  // whether streams still add to it
  // Whether they ran, one by one: working memory and lazily loaded code are in place then, and a queue can capture.
  bool ran = false;
  // Of the branches from 1 on, made for the first replay; null where the stream's own queue serves.
  Queues queues;
  // All steps at one stroke, where the queue has such a thing.
  std::unique_ptr<Graph> graph;

  // Whether the stream's own order comes, at its end, after every step of every branch.
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
