// What the parts of the Python module share.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace lily {

// The kernel table and single launches, for tests and tools.
void bind_kernels(pybind11::module_& module);

}  // namespace lily
