// What the parts of the Python module share.
#pragma once

#include <cxxabi.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <new>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "error.h"

namespace lily {

using Ids = pybind11::array_t<int32_t, pybind11::array::c_style>;  // no silent narrowing

inline std::span<const int32_t> span_of(const Ids& ids) {
    if (ids.ndim() != 1) throw Error(ErrorKind::kValue, "token ids must be a one-dimensional array");
    return {ids.data(), static_cast<size_t>(ids.size())};
}

// Runs `work` without the GIL. This is no scope guard: taking the GIL back ends the thread when the interpreter is
// shutting down, and a thread that ends inside a destructor takes the process with it.
template <class Work>
auto without_gil(Work&& work) {
    using Result = std::invoke_result_t<Work>;
    struct Nothing {};
    std::optional<std::conditional_t<std::is_void_v<Result>, Nothing, Result>> result;
    std::exception_ptr error;
    PyThreadState* const state = PyEval_SaveThread();
    try {
        if constexpr (std::is_void_v<Result>)
            work();
        else
            result.emplace(work());
#ifdef __GLIBCXX__
    } catch (const abi::__forced_unwind&) {
        throw;
#endif
    } catch (...) {
        error = std::current_exception();
    }
    PyEval_RestoreThread(state);
    if (error) std::rethrow_exception(error);
    if constexpr (!std::is_void_v<Result>) return std::move(*result);
}

// pybind11 keeps every object in a map, by its address, and where that cannot grow the process ends: it is no place to
// throw from. Of a bound class T, such an object stays out of the map, which is for finding it again only.
template <class T>
void survive_full_memory() {
    namespace detail = pybind11::detail;
    static auto* const type = detail::get_type_info(typeid(T), true);
    static const auto usual = type->init_instance;
    detail::all_type_info(type->type);  // made at the first object otherwise, which is no place either
    type->init_instance = [](detail::instance* object, const void* holder) {
        try {
            usual(object, holder);
        } catch (const std::bad_alloc&) {
            auto value = object->get_value_and_holder(type);
            value.set_instance_registered(true);
            usual(object, holder);
            value.set_instance_registered(false);
        }
    };
}

// The kernel table and single launches, for tests and `lily doctor`.
void bind_kernels(pybind11::module_& module);

// What else `lily doctor` needs.
void bind_doctor(pybind11::module_& module);

// What builds for benchmarks have beside (src/lily_bench).
void bind_bench(pybind11::module_& module);

}  // namespace lily
