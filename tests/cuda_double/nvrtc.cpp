// A double of libnvrtc, of the version that its file is named after. A compiled kernel is a text with its name and the
// number of its arrays, which the double of libcuda takes for machine code.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "../../src/lily_native/cuda_api.h"
#include "control.h"

using cuda_double::misuse;
using lily::cuda::Program;
using lily::cuda::Result;

#define LILY_DECLARE(member, name, parameters) LILY_DOUBLE_EXPORT Result name parameters;
LILY_NVRTC_FUNCTIONS(LILY_DECLARE)
LILY_DOUBLE_EXPORT const char* nvrtcGetErrorString(Result result);
LILY_DOUBLE_EXPORT int64_t lily_double_live(const char* kind);

namespace {

constexpr Result kInvalidInput = 3, kInvalidProgram = 4;

struct Compilation {
    std::string source, code, log;
};

std::mutex mutex;
std::map<Program, Compilation> programs;
size_t made = 0;

// The name of the kernel in a text, and how many arrays it takes: all parameters but the last.
std::string code_of(const std::string& source) {
    size_t at = source.rfind("__global__");
    if (at == std::string::npos) return "";
    at = source.find(')', at) + 2;  // behind the bounds of launches
    const size_t open = source.find('(', at), close = source.find(')', open);
    size_t arrays = 0;
    for (size_t i = open; i < close; ++i) arrays += source[i] == ',' ? 1 : 0;
    return "LILY " + source.substr(at, open - at) + " " + std::to_string(arrays) + "\n";
}

Compilation* find(Program program, const char* where) {
    const auto found = programs.find(program);
    if (found != programs.end()) return &found->second;
    misuse("%s: no such program", where);
    return nullptr;
}

// A call that gives something of a program.
template <class Give>
Result with(const char* name, Program program, const Give& give) {
    if (const Result result = cuda_double::begin(name).result) return result;
    const std::lock_guard guard(mutex);
    const Compilation* const found = find(program, name);
    if (!found) return kInvalidProgram;
    give(*found);
    return 0;
}

}  // namespace

const char* nvrtcGetErrorString(Result result) {
    return result == 1 ? "NVRTC_ERROR_OUT_OF_MEMORY" : result == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}

int64_t lily_double_live(const char*) {
    const std::lock_guard guard(mutex);
    return static_cast<int64_t>(programs.size());
}

Result nvrtcVersion(int* major, int* minor) {
    if (const Result result = cuda_double::begin("nvrtcVersion").result) return result;
    Dl_info self{};
    dladdr(reinterpret_cast<const void*>(&lily_double_live), &self);
    *major = std::atoi(std::strrchr(self.dli_fname, '.') + 1);
    *minor = 0;
    return 0;
}

Result nvrtcCreateProgram(Program* program, const char* source, const char* name, int headers,
                          const char* const* header_texts, const char* const* header_names) {
    if (const Result result = cuda_double::begin("nvrtcCreateProgram").result) return result;
    for (int i = 0; i < headers; ++i)
        if (!header_texts[i] || !header_names[i]) return kInvalidInput;
    const std::lock_guard guard(mutex);
    *program = reinterpret_cast<Program>(++made);
    programs[*program] = {source, "", std::string(name) + ": no compiler\n"};
    return 0;
}

Result nvrtcDestroyProgram(Program* program) {
    const Result result = cuda_double::begin("nvrtcDestroyProgram").result;
    const std::lock_guard guard(mutex);
    if (find(*program, "nvrtcDestroyProgram")) programs.erase(*program);
    *program = nullptr;
    return result;
}

Result nvrtcCompileProgram(Program program, int count, const char* const* options) {
    if (const Result result = cuda_double::begin("nvrtcCompileProgram").result) return result;
    for (int i = 0; i < count; ++i)
        if (std::strncmp(options[i], "--", 2) != 0) return kInvalidInput;
    const std::lock_guard guard(mutex);
    Compilation* const found = find(program, "nvrtcCompileProgram");
    if (!found) return kInvalidProgram;
    found->code = code_of(found->source);
    return found->code.empty() ? kInvalidInput : 0;
}

// Sizes of texts count the zero at the end.
Result nvrtcGetProgramLogSize(Program program, size_t* bytes) {
    return with("nvrtcGetProgramLogSize", program, [&](const Compilation& of) { *bytes = of.log.size() + 1; });
}

Result nvrtcGetProgramLog(Program program, char* text) {
    return with("nvrtcGetProgramLog", program,
                [&](const Compilation& of) { std::memcpy(text, of.log.c_str(), of.log.size() + 1); });
}

Result nvrtcGetCUBINSize(Program program, size_t* bytes) {
    return with("nvrtcGetCUBINSize", program, [&](const Compilation& of) { *bytes = of.code.size(); });
}

Result nvrtcGetCUBIN(Program program, char* image) {
    return with("nvrtcGetCUBIN", program,
                [&](const Compilation& of) { std::memcpy(image, of.code.data(), of.code.size()); });
}
