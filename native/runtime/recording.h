// Operations that a stream has been told once and repeats as often as it is asked.
#pragma once

#include <memory>
#include <vector>

#include "runtime/device.h"
#include "runtime/operation.h"

namespace kv {

struct Recording {
  std::vector<Operation> operations;
  // Whether they ran, one by one: working memory and lazily loaded code are in place then, and a queue can capture.
  bool ran = false;
  // All of them at one stroke, where the queue has such a thing.
  std::unique_ptr<Graph> graph;
};

}  // namespace kv
