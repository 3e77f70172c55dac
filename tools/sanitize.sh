#!/bin/sh
# Builds Lily with AddressSanitizer and UBSan into build/sanitize and runs the tests that exercise native code on it.
# Python itself is not built so: the runtime is preloaded, and leaks of the interpreter are not reported.
set -eu
cd "$(dirname "$0")/.."
out=build/sanitize
sh tools/build.sh $out -DLILY_SANITIZE=address,undefined
preload=$("${CXX:-c++}" -print-file-name=libasan.so):$("${CXX:-c++}" -print-file-name=libubsan.so)
LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 \
    UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 PYTHONPATH=$out/root PYTHONMALLOC=malloc \
    "$BIN/python" -m pytest -q -p no:cacheprovider -m 'not timing and not long' tests/test_kernels.py tests/test_tiles.py tests/test_load.py tests/test_api.py \
    tests/test_invariance.py tests/test_threads.py
