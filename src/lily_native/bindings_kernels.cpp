// The kernel table as Python data, and single launches on numpy arrays: what the tests of the shaders need.
#include <chrono>
#include <cstring>
#include <mutex>

#include "bindings.h"
#include "cuda_compiler.h"
#include "device.h"
#include "error.h"
#include "kernel.h"
#include "plan.h"

namespace py = pybind11;

namespace lily {
namespace {

// Bytes around every slot that a kernel must not touch. All bits set is not a number in every float type.
constexpr uint64_t kGuard = 1024;
constexpr std::byte kGuardByte{0xff};

const KernelInfo& kernel_named(const std::string& name) {
    const KernelInfo* kernel = find_kernel(name);
    if (!kernel) throw Error(ErrorKind::kValue, "there is no kernel " + name);
    return *kernel;
}

py::dict kernel_dict(const KernelInfo& kernel) {
    py::list slots, args, consts;
    for (uint32_t i = 0; i < kernel.slot_count; ++i) {
        const SlotInfo& s = kernel.slots[i];
        slots.append(py::dict(py::arg("name") = s.name, py::arg("type") = s.type, py::arg("bytes") = s.element_bytes,
                              py::arg("written") = s.written, py::arg("shape") = s.shape));
    }
    for (uint32_t i = 0; i < kernel.arg_count; ++i)
        args.append(
            py::dict(py::arg("name") = kernel.args[i].name, py::arg("type") = std::string(1, kernel.args[i].type)));
    for (uint32_t i = 0; i < kernel.const_count; ++i) {
        const ConstInfo& c = kernel.consts[i];
        py::object mirrors = py::none();
        if (c.mirrors >= 0) mirrors = py::str(kernel.args[c.mirrors].name);
        consts.append(py::dict(py::arg("name") = c.name, py::arg("mirrors") = mirrors, py::arg("max") = c.max));
    }
    return py::dict(py::arg("name") = kernel.name, py::arg("where") = kernel.where, py::arg("used") = kernel.used,
                    py::arg("simds") = kernel.simds, py::arg("slots") = slots, py::arg("args") = args,
                    py::arg("consts") = consts);
}

// Fills args and consts of a launch from dictionaries; every name must be there and no other.
Launch launch_of(const KernelInfo& kernel, const py::dict& args, const py::dict& consts) {
    Launch launch;
    launch.kernel = &kernel;
    if (py::len(args) != kernel.arg_count)
        throw Error(ErrorKind::kValue, std::string(kernel.name) + ": wrong number of args");
    for (uint32_t i = 0; i < kernel.arg_count; ++i) {
        const py::object value = args[kernel.args[i].name];
        if (kernel.args[i].type == 'f') {
            const float number = value.cast<float>();
            std::memcpy(launch.args.data() + 4 * i, &number, 4);
        } else {
            const uint32_t number =
                kernel.args[i].type == 'i' ? static_cast<uint32_t>(value.cast<int32_t>()) : value.cast<uint32_t>();
            std::memcpy(launch.args.data() + 4 * i, &number, 4);
        }
    }
    for (uint32_t i = 0; i < kernel.const_count; ++i) {
        const ConstInfo& c = kernel.consts[i];
        if (c.mirrors >= 0 && !consts.contains(c.name))
            std::memcpy(&launch.consts[i], launch.args.data() + 4 * c.mirrors, 4);
        else
            launch.consts[i] = consts[c.name].cast<uint32_t>();
    }
    return launch;
}

// One device per width and thread count, kept for the life of the process: tests launch thousands of kernels.
Device& test_device(const std::string& name, uint32_t threads) {
    static std::mutex mutex;
    // Never destroyed: at exit, what a device builds upon may be gone before it.
    static auto& devices = *new std::map<std::pair<std::string, uint32_t>, std::unique_ptr<Device>>;
    const std::lock_guard guard(mutex);
    auto& device = devices[{name, threads}];
#if LILY_METAL
    if (!device && name == "metal") device = make_metal_device();
#endif
    // cudam multiplies tiles as GPUs without warpgroup instructions do.
    if (!device && name == "cudam") device = make_cuda_device(0, true);
    if (const std::optional<uint32_t> index = cuda_index(name); !device && index) device = make_cuda_device(*index);
    if (!device && name != "cpu" && name != "cpu32" && name != "cpu32s")
        throw Error(ErrorKind::kValue, "unknown device " + name);
    if (!device) {
        // cpu32s multiplies tiles as GPUs without tensor operations do.
        const char* object = name == "cpu32s" ? "liblily_cpu32_simdgroup" : nullptr;
        device = make_cpu_device(name == "cpu" ? 1 : 32, threads, object);
    }
    return *device;
}

struct Array {
    py::array array;
    BufferId buffer;
    uint64_t bytes;
};

// The slots' memory on the device, between guards; released whatever happens.
class Arrays {
public:
    Arrays(Device& device, const KernelInfo& kernel) : device_(device), kernel_(kernel) {}
    Arrays(const Arrays&) = delete;
    Arrays& operator=(const Arrays&) = delete;
    ~Arrays() {
        for (const Array& a : arrays_) {
            try {
                device_.release(a.buffer);
            } catch (const Error&) {
                // After a kernel that failed, a GPU may refuse everything; that failure is what the caller hears of.
            }
        }
    }

    void put(const py::dict& slots) {
        if (py::len(slots) != kernel_.slot_count)
            throw Error(ErrorKind::kValue, std::string(kernel_.name) + ": wrong number of slots");
        for (uint32_t i = 0; i < kernel_.slot_count; ++i) {
            const auto array = py::cast<py::array>(slots[kernel_.slots[i].name]);
            if (!(array.flags() & py::array::c_style))
                throw Error(ErrorKind::kValue, std::string(kernel_.slots[i].name) + ": the array must be contiguous");
            const auto bytes = static_cast<uint64_t>(array.nbytes());
            const BufferId buffer = device_.allocate("test", bytes + 2 * kGuard);
            arrays_.push_back({array, buffer, bytes});
            std::vector<std::byte> guarded(bytes + 2 * kGuard, kGuardByte);
            std::memcpy(guarded.data() + kGuard, array.data(), bytes);
            device_.write(buffer, 0, guarded.data(), guarded.size());
        }
    }
    SlotRef ref(uint32_t i) const { return {arrays_[i].buffer, kGuard, arrays_[i].bytes}; }

    // Copies everything back, also what should be unchanged; throws kLogic when a guard was overwritten.
    void take_back() {
        for (uint32_t i = 0; i < arrays_.size(); ++i) {
            Array& a = arrays_[i];
            std::vector<std::byte> at(a.bytes + 2 * kGuard);
            device_.read(a.buffer, 0, at.data(), at.size());
            for (uint64_t j = 0; j < kGuard; ++j)
                if (at[j] != kGuardByte || at[kGuard + a.bytes + j] != kGuardByte)
                    throw Error(ErrorKind::kLogic,
                                std::string(kernel_.name) + "." + kernel_.slots[i].name + ": written outside");
            std::memcpy(a.array.mutable_data(), at.data() + kGuard, a.bytes);
        }
    }

private:
    Device& device_;
    const KernelInfo& kernel_;
    std::vector<Array> arrays_;
};

// Returns the seconds of each of `repeats` runs.
std::vector<double> run_kernel(const std::string& name, const py::dict& args, const py::dict& consts,
                               const py::dict& slots, const std::string& device_name, uint32_t threads,
                               uint32_t repeats) {
    const KernelInfo& kernel = kernel_named(name);
    Launch launch = launch_of(kernel, args, consts);
    Device& device = test_device(device_name, threads);
    Arrays arrays(device, kernel);
    arrays.put(slots);
    for (uint32_t i = 0; i < kernel.slot_count; ++i) launch.slots[i] = arrays.ref(i);
    Recorder recorder;
    recorder.scope("test");
    recorder.add(launch);
    const Plan plan = recorder.finish(name);
    const auto program = device.prepare(plan);
    std::vector<double> seconds;
    for (uint32_t i = 0; i < repeats; ++i) {
        const auto start = std::chrono::steady_clock::now();
        device.run(*program);
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    arrays.take_back();
    return seconds;
}

std::vector<uint64_t> slot_counts(const std::string& name, const py::dict& args, const py::dict& consts) {
    const KernelInfo& kernel = kernel_named(name);
    const Launch launch = launch_of(kernel, args, consts);
    std::vector<uint64_t> counts(kMaxSlots);
    kernel.counts(launch.args.data(), launch.consts.data(), counts.data());
    counts.resize(kernel.slot_count);
    return counts;
}

// (read, written) bytes of every slot.
std::vector<std::pair<uint64_t, uint64_t>> slot_traffic(const std::string& name, const py::dict& args,
                                                        const py::dict& consts) {
    const KernelInfo& kernel = kernel_named(name);
    const Launch launch = launch_of(kernel, args, consts);
    uint64_t read[kMaxSlots], written[kMaxSlots];
    kernel.traffic(launch.args.data(), launch.consts.data(), read, written);
    std::vector<std::pair<uint64_t, uint64_t>> result;
    for (uint32_t i = 0; i < kernel.slot_count; ++i) result.emplace_back(read[i], written[i]);
    return result;
}

// Kernels that only benchmarks launch are compared with the product's (tools/ablation.py), not with references.
bool of_product(const KernelInfo& kernel) {
    return std::string_view(kernel.used) != "bench";
}

py::list variants(const std::string& device) {
    py::list all;
    for (const Variant& v : test_device(device, 1).variants()) {
        if (!of_product(*v.kernel)) continue;
        py::dict consts;
        for (uint32_t i = 0; i < v.kernel->const_count; ++i) consts[v.kernel->consts[i].name] = v.consts[i];
        all.append(py::make_tuple(v.kernel->name, consts));
    }
    return all;
}

}  // namespace

void bind_kernels(py::module_& m) {
    m.def("kernels", [] {
        py::list all;
        for (size_t i = 0; i < kKernelCount; ++i)
            if (of_product(kKernels[i])) all.append(kernel_dict(kKernels[i]));
        return all;
    });
    m.def("run_kernel", &run_kernel, py::arg("name"), py::arg("args"), py::arg("consts"), py::arg("slots"),
          py::arg("device"), py::arg("threads") = 1, py::arg("repeats") = 1);
    m.def("slot_counts", &slot_counts, py::arg("name"), py::arg("args"), py::arg("consts"));
    m.def("slot_traffic", &slot_traffic, py::arg("name"), py::arg("args"), py::arg("consts"));
    m.def("variants", &variants, py::arg("device"));
    // Devices of this build, whether the machine has them or not.
    m.def("devices", [] {
        std::vector<std::string> names = {"cpu", "cpu32", "cuda"};
#if LILY_METAL
        names.emplace_back("metal");
#endif
        return names;
    });
    // Why no GPU can be used through CUDA here; None when one can.
    m.def("cuda_problem", []() -> std::optional<std::string> {
        try {
            make_cuda_device(0);
        } catch (const Error& error) {
            return error.what();
        }
        return std::nullopt;
    });
    m.def("set_cuda_cache", &set_cuda_cache, py::arg("folder"));
    // (code, compiler's log) of a variant; needs no GPU.
    m.def(
        "cuda_compile",
        [](const std::string& name, const std::map<std::string, uint32_t>& consts, const std::string& architecture) {
            Variant variant{&kernel_named(name), {}};
            for (uint32_t i = 0; i < variant.kernel->const_count; ++i)
                variant.consts[i] = consts.at(variant.kernel->consts[i].name);
            const CudaImage image = without_gil([&] { return CudaCompiler(architecture, "").compile(variant); });
            return py::make_tuple(py::bytes(image.code), image.log);
        },
        py::arg("name"), py::arg("consts"), py::arg("architecture"));
    m.def("shape_constants", [] {
        std::map<std::string, uint32_t> constants;
        for (size_t i = 0; i < kShapeConstantCount; ++i) constants[kShapeConstants[i].name] = kShapeConstants[i].value;
        return constants;
    });
}

}  // namespace lily
