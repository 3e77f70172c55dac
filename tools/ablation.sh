#!/bin/sh
# Builds Lily with what only benchmarks run into build/ablation, checks it there, and runs ablation.py with the arguments.
set -eu
cd "$(dirname "$0")/.."
out=build/ablation
mkdir -p $out
"$BIN/cmake" -S . -B $out -G Ninja -DCMAKE_MAKE_PROGRAM="$BIN/ninja" -DPython_EXECUTABLE="$BIN/python" \
    -Dpybind11_DIR="$("$BIN/python" -m pybind11 --cmakedir)" -DLILY_BENCH=ON >$out.log 2>&1 || { cat $out.log; exit 1; }
"$BIN/cmake" --build $out --parallel "$JOBS"
"$BIN/cmake" --install $out --prefix $out/root >/dev/null
cp -R python/lily/. $out/root/lily/
export PYTHONPATH=$out/root
"$BIN/python" -m pytest -q -p no:cacheprovider tests/bench/check_ablation.py
"$BIN/python" tools/ablation.py "$@"
