#!/usr/bin/env bash
# Runs native tests under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer.
#
# tools/sanitize.sh                      the native tests
# tools/sanitize.sh PACKAGE [FILTER…]    a package's tests, with an addon under AddressSanitizer and UBSan
set -euo pipefail
cd "$(dirname "$0")/.."

build_with() {
  local build="build/native-$1" optimisation=$2 sanitizers=$3 target=$4
  cmake -S native -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_JS_VERSION=8 \
    -DCMAKE_JS_INC="$PWD/node_modules/node-api-headers/include;$PWD/node_modules/node-addon-api" \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="$optimisation -g1 -fno-omit-frame-pointer -fsanitize=$sanitizers -fno-sanitize-recover=all" \
    >"$build.log"
  cmake --build "$build" --target "$target" --parallel "$(nproc)" >>"$build.log" 2>&1 ||
    { cat "$build.log"; return 1; }
}

# Optimising what AddressSanitizer has instrumented takes GCC several times as long as the tests then gain by it.
# Without that it takes branches for reachable that are not, and warns of what they would read.
build_asan() {
  build_with asan "-O0 -Wno-stringop-overread" address,undefined "$1"
}

# ThreadSanitizer of GCC 12 refuses the address layouts that newer kernels choose.
run_tests() {
  setarch "$(uname -m)" --addr-no-randomize "build/native-$1/native_tests"
}

mkdir -p build
export UBSAN_OPTIONS=print_stacktrace=1

if [ $# -gt 0 ]; then
  package=$1
  shift
  build_asan kv
  # What Node keeps to its end is no leak of ours.
  export ASAN_OPTIONS=detect_leaks=0 KV_SANITIZED_ADDON=$PWD/build/native-asan/kv.node
  export NODE_OPTIONS="--import=$PWD/tools/sanitized-addon.mjs"
  LD_PRELOAD=$(g++ -print-file-name=libasan.so) exec node node_modules/vitest/vitest.mjs run --root "packages/$package" --reporter=default "$@"
fi

build_with tsan -O1 thread native_tests
build_asan native_tests

# Most of the tests' time is spent in oracles, on one thread.
run_tests asan >build/native-asan-tests.log 2>&1 &
failed=0
echo 'sanitize: thread'
run_tests tsan || failed=1
wait "$!" || failed=1
echo 'sanitize: address,undefined'
cat build/native-asan-tests.log
exit "$failed"
