#!/usr/bin/env bash
# Runs the native tests under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."

build_with() {
  local build="build/native-$1" optimisation=$2 sanitizers=$3
  cmake -S native -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="$optimisation -g1 -fno-omit-frame-pointer -fsanitize=$sanitizers -fno-sanitize-recover=all" \
    >"$build.log"
  cmake --build "$build" --target native_tests --parallel "$(nproc)" >>"$build.log" 2>&1 ||
    { cat "$build.log"; return 1; }
}

# ThreadSanitizer of GCC 12 refuses the address layouts that newer kernels choose.
run_tests() {
  setarch "$(uname -m)" --addr-no-randomize "build/native-$1/native_tests"
}

mkdir -p build
export UBSAN_OPTIONS=print_stacktrace=1
# Optimising what AddressSanitizer has instrumented takes GCC several times as long as the tests then gain by it.
# Without that it takes branches for reachable that are not, and warns of what they would read.
build_with asan "-O0 -Wno-stringop-overread" address,undefined
build_with tsan -O1 thread

# Most of the tests' time is spent in oracles, on one thread.
run_tests asan >build/native-asan-tests.log 2>&1 &
failed=0
echo 'sanitize: thread'
run_tests tsan || failed=1
wait "$!" || failed=1
echo 'sanitize: address,undefined'
cat build/native-asan-tests.log
exit "$failed"
