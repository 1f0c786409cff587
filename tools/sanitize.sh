#!/usr/bin/env bash
# Runs the native tests under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."

run_under() {
  local name=$1 sanitizers=$2
  local build="build/native-$name"
  echo "sanitize: $sanitizers"
  cmake -S native -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g -fno-omit-frame-pointer -fsanitize=$sanitizers -fno-sanitize-recover=all" \
    >"build/native-$name.log"
  cmake --build "$build" --target native_tests --parallel "$(nproc)" >>"build/native-$name.log" 2>&1 ||
    { cat "build/native-$name.log"; return 1; }
  # ThreadSanitizer of GCC 12 refuses the address layouts that newer kernels choose.
  setarch "$(uname -m)" --addr-no-randomize "$build/native_tests"
}

mkdir -p build
export UBSAN_OPTIONS=print_stacktrace=1
run_under asan address,undefined
run_under tsan thread
