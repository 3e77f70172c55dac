#include "cuda_api.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <span>

#include "error.h"

namespace lily::cuda {
namespace {

// CUDA 12.4: edges of graphs with data. Its libraries keep their functions from then on.
constexpr const char* kDriverNames[] = {"libcuda.so.1", "libcuda.so"};
constexpr const char* kCompilerNames[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so",
                                          "/usr/local/cuda/lib64/libnvrtc.so"};
constexpr int kDriverOfCompiler13 = 13000;  // a driver takes code of compilers of its own major version, or older

// After these "the process must be terminated and relaunched", says cuda.h: an address that cannot be used, a time-out,
// an assertion, what is wrong with an instruction, a launch that failed.
constexpr Result kStaying[] = {226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 725};

void* open_first(std::span<const char* const> names, const char* advice) {
    std::string reason;
    for (const char* name : names) {
        if (void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
        const char* const problem = dlerror();
        if (reason.empty() && problem) reason = problem;
    }
    throw Error(ErrorKind::kUnsupported, std::string("cuda: ") + reason + "; " + advice);
}

template <class F>
void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (!function)
        throw Error(ErrorKind::kUnsupported, std::string("cuda: ") + name + " is missing: CUDA 12.4 is needed");
}

template <class Signature>
void find(void* library, const char* name, Entry<Signature>& entry) {
    entry.name = name;
    find(library, name, entry.address);
}

std::string text_of(const Driver& driver, const Outcome& outcome) {
    const char* text = nullptr;
    const bool known = driver.error_string(outcome.result, &text).ok() && text;
    return std::string(outcome.function) + ": " + (known ? text : "error " + std::to_string(outcome.result));
}

Driver open_driver() {
    void* const library = open_first(kDriverNames, "an NVIDIA GPU and its driver are needed");
    Driver made{};
#define LILY_FIND(member, name, parameters) find(library, #name, made.member);
    LILY_CUDA_FUNCTIONS(LILY_FIND)
    // A machine may have the driver and no GPU.
    if (const Outcome outcome = made.init(0); !outcome.ok())
        throw Error(ErrorKind::kUnsupported, "cuda: the driver does not start: " + text_of(made, outcome));
    return made;
}

// The newest there is where no driver is: code can be made without one.
int driver_version() {
    try {
        int version = 0;
        if (driver().driver_version(&version).ok()) return version;
    } catch (const Error&) {
    }
    return std::numeric_limits<int>::max();
}

Compiler open_compiler() {
    std::span<const char* const> names = kCompilerNames;
    if (driver_version() < kDriverOfCompiler13) names = names.subspan(1);
    void* const library = open_first(names,
                                     "install CUDA's run-time compiler: pip install nvidia-cuda-nvrtc, or "
                                     "nvidia-cuda-nvrtc-cu12 for drivers older than CUDA 13");
    Compiler made{};
    find(library, "nvrtcGetErrorString", made.error_string);
    LILY_NVRTC_FUNCTIONS(LILY_FIND)
#undef LILY_FIND
    return made;
}

}  // namespace

const Driver& driver() {
    static const Driver opened = open_driver();
    return opened;
}

bool stays(Result result) {
    return std::find(std::begin(kStaying), std::end(kStaying), result) != std::end(kStaying);
}

std::string text_of(const Outcome& outcome) {
    return text_of(driver(), outcome) + (stays(outcome.result) ? "; restart the process" : "");
}

void check(const Outcome& outcome, const std::string& what) {
    if (!outcome.ok()) fail(outcome, what);
}

void fail(const Outcome& outcome, const std::string& what) {
    throw Error(outcome.result == kOutOfMemory ? ErrorKind::kOutOfMemory : ErrorKind::kDevice,
                "cuda: " + what + ": " + text_of(outcome));
}

const Compiler& compiler() {
    static const Compiler opened = open_compiler();
    return opened;
}

}  // namespace lily::cuda
