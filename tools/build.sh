#!/bin/sh
# Builds Lily into a folder, with the options that follow it for CMake; FOLDER/root is then for PYTHONPATH.
set -eu
out=$1
shift
mkdir -p "$out"
"$BIN/cmake" -S . -B "$out" -G Ninja -DCMAKE_MAKE_PROGRAM="$BIN/ninja" -DPython_EXECUTABLE="$BIN/python" \
    -Dpybind11_DIR="$("$BIN/python" -m pybind11 --cmakedir)" "$@" >"$out.log" 2>&1 || { cat "$out.log"; exit 1; }
"$BIN/cmake" --build "$out" --parallel "$JOBS"
"$BIN/cmake" --install "$out" --prefix "$out/root" >/dev/null
cp -R python/lily/. "$out/root/lily/"
