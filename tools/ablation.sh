#!/bin/sh
# Builds Lily with what only benchmarks run into build/ablation, checks it there, and runs ablation.py with the arguments.
set -eu
cd "$(dirname "$0")/.."
out=build/ablation
sh tools/build.sh $out -DLILY_BENCH=ON
export PYTHONPATH=$out/root
"$BIN/python" -m pytest -q -p no:cacheprovider tests/bench/check_ablation.py
"$BIN/python" tools/ablation.py "$@"
