#include "kernels.h"

#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "control.h"
#include "grids.h"

namespace metal_double {
namespace {

using lily::CpuKernel;
using lily::CpuObject;
using lily::KernelInfo;

[[noreturn]] void give_up(const std::string& what) {
    std::fprintf(stderr, "metal double: %s\n", what.c_str());
    std::abort();
}

// The folder of the library that the double is linked into, where the build puts the CPU objects.
std::string objects_directory() {
    const std::string set = text(Text::kObjectsDirectory);
    if (!set.empty()) return set;
    Dl_info info{};
    if (dladdr(reinterpret_cast<const void*>(&find_form), &info) == 0 || info.dli_fname == nullptr)
        give_up("cannot tell where it was loaded from");
    const std::string path = info.dli_fname;
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash);
}

const char* fast_object() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt"))
        return "liblily_cpu_v3.so";
#endif
    return "liblily_cpu_baseline.so";
}

// A CPU object by kernel.
struct Object {
    std::vector<std::vector<const CpuKernel*>> variants;

    Object(const char* name, uint32_t width) : variants(lily::kKernelCount) {
        const std::string path = objects_directory() + "/" + name;
        void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) give_up("cannot open " + path + ": " + dlerror());
        const auto entry = reinterpret_cast<const CpuObject* (*)()>(dlsym(handle, "lily_cpu_object"));
        const CpuObject* object = entry != nullptr ? entry() : nullptr;
        if (object == nullptr || object->table_hash != lily::kTableHash || object->width != width)
            give_up(path + " was built from other shaders");
        for (uint32_t i = 0; i < object->count; ++i)
            variants.at(object->kernels[i].kernel).push_back(&object->kernels[i]);
    }

    const CpuKernel* find(const Function& function) const {
        const CpuKernel* best = nullptr;
        int best_score = -1;
        for (const CpuKernel* candidate : variants[function.kernel->index]) {
            const int score = lily::variant_score(*function.kernel, candidate->consts, function.consts);
            if (score <= best_score) continue;
            best = candidate;
            best_score = score;
        }
        return best;
    }
};

// They stay open: threads may still be inside them when the process ends.
const Object& object_of(uint32_t width, bool tensor_form) {
    static const Object& tensor = *new Object("liblily_cpu32.so", 32);
    if (width == 32 && tensor_form) return tensor;
    if (width == 32) {
        static const Object& simdgroup = *new Object("liblily_cpu32_simdgroup.so", 32);
        return simdgroup;
    }
    static const Object& fast = *new Object(fast_object(), 1);
    return fast;
}

bool is_exact(const CpuKernel* form, const Function& function) {
    return form != nullptr && std::equal(function.consts.begin(), function.consts.end(), form->consts);
}

bool is_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

std::string_view word_at(std::string_view line, size_t at) {
    size_t end = at;
    while (end < line.size() && is_word(line[end])) ++end;
    return line.substr(at, end - at);
}

// "_4_2048" as numbers; no value when it is something else.
std::optional<std::vector<uint32_t>> numbers(std::string_view list) {
    std::vector<uint32_t> values;
    while (!list.empty()) {
        if (!list.starts_with('_')) return std::nullopt;
        list.remove_prefix(1);
        uint32_t value = 0;
        const auto [end, status] = std::from_chars(list.data(), list.data() + list.size(), value);
        if (status != std::errc()) return std::nullopt;
        values.push_back(value);
        list.remove_prefix(static_cast<size_t>(end - list.data()));
    }
    return values;
}

// The kernel of the longest name that the function's begins with; what follows are its consts.
std::optional<Function> function_named(std::string_view name) {
    Function function;
    size_t longest = 0;
    for (const KernelInfo& kernel : std::span(lily::kKernels, lily::kKernelCount)) {
        const std::string_view own = kernel.name;
        if (!name.starts_with(own) || own.size() < longest) continue;
        function.kernel = &kernel;
        longest = own.size();
    }
    if (function.kernel == nullptr) return std::nullopt;
    const auto consts = numbers(name.substr(longest));
    if (!consts || consts->size() != function.kernel->const_count) return std::nullopt;
    std::copy(consts->begin(), consts->end(), function.consts.begin());
    return function;
}

// Reads a source line by line, as far as the double has to understand it.
class Reader {
public:
    Source read(std::string_view text) {
        while (!text.empty() && source_.error.empty()) {
            const size_t end = std::min(text.find('\n'), text.size());
            line_ = text.substr(0, end);
            ++number_;
            read_line();
            if (!line_.empty()) before_ = line_;
            text.remove_prefix(std::min(end + 1, text.size()));
        }
        return std::move(source_);
    }

private:
    void read_line() {
        constexpr std::string_view kInstance = "template [[host_name(\"", kKernel = "KERNEL(";
        if (line_.starts_with("#")) {
            read_directive();
        } else if (line_.starts_with(kInstance)) {
            read_instance(line_.substr(kInstance.size()));
        } else if (line_.starts_with(kKernel)) {
            read_declaration(line_.substr(kKernel.size()));
        }
    }

    // An #error inside a condition is not judged: the double evaluates no conditions.
    void read_directive() {
        std::string_view rest = line_.substr(1);
        while (rest.starts_with(' ')) rest.remove_prefix(1);
        const std::string_view word = word_at(rest, 0);
        if (word == "if" || word == "ifdef" || word == "ifndef") ++conditions_;
        if (word == "endif") --conditions_;
        if (word == "error" && conditions_ == 0) fail(std::string(rest.substr(word.size())));
        if (rest == "define LILY_TENSOR_OPS 1") source_.tensor_form = true;
    }

    void read_declaration(std::string_view rest) {
        const std::string name(word_at(rest, 0));
        const auto function = function_named(name);
        if (before_.starts_with("template")) {
            templates_.insert(name);
        } else if (!function) {
            fail(" '" + name + "' is not a kernel without consts");
        } else {
            add(name, *function);
        }
    }

    // NAME")]] [[kernel]] decltype(KERNEL<1, 2>) KERNEL<1, 2>;
    void read_instance(std::string_view rest) {
        const std::string name(word_at(rest, 0));
        const auto function = function_named(name);
        if (!function) return fail(" host_name '" + name + "' does not name a kernel and its consts");
        const std::string kernel = function->kernel->name;
        if (templates_.count(kernel) == 0) return fail(" no template named '" + kernel + "'");
        std::string instance = kernel + "<";
        for (uint32_t i = 0; i < function->kernel->const_count; ++i)
            instance += (i == 0 ? "" : ", ") + std::to_string(function->consts[i]);
        instance += ">";
        if (rest != name + "\")]] [[kernel]] decltype(" + instance + ") " + instance + ";")
            return fail(" explicit instantiation does not agree with its host_name '" + name + "'");
        add(name, *function);
    }

    void add(const std::string& name, const Function& function) {
        if (!source_.functions.emplace(name, function).second) fail(" redefinition of '" + name + "'");
    }

    void fail(const std::string& what) {
        source_.error = "program_source:" + std::to_string(number_) + ":1: error:" + what;
    }

    Source source_;
    std::set<std::string> templates_;
    std::string_view line_, before_;
    int number_ = 0, conditions_ = 0;
};

}  // namespace

Source read_source(std::string_view text) {
    return Reader().read(text);
}

Form find_form(const Function& function, uint32_t width, bool tensor_form) {
    if (width != 1 && width != 32) give_up("the setting width is neither 1 nor 32");
    const CpuKernel* run = object_of(width, tensor_form).find(function);
    return {function, run, width == 32 && is_exact(run, function)};
}

std::array<uint32_t, 3> needed_grid(const Function& function, const void* args) {
    const CpuKernel* wide = object_of(32, true).find(function);
    if (!is_exact(wide, function)) return lily::grid_of(function.kernel->index, args, function.consts.data());
    std::array<uint32_t, 3> grid{};
    wide->grid(args, grid.data());
    return grid;
}

}  // namespace metal_double
