#include "cuda_compiler.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda_api.h"
#include "shader_source.h"

namespace lily {
namespace {

// No contraction: fma is written where it is wanted, and all forms of a kernel round alike. The assembler's report of
// registers comes with the log.
constexpr const char* kOptions[] = {"--std=c++20", "--device-as-default-execution-space", "--fmad=false",
                                    "--ptxas-options=-v"};

// FNV-1a; two of them with different beginnings name and seal cache entries, which nobody attacks.
uint64_t hash_of(std::string_view text, uint64_t hash = 0xcbf29ce484222325u) {
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    return hash;
}

std::string hex(uint64_t value) {
    char text[20];
    std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
    return text;
}

std::mutex cache_mutex;
std::string cache_place;

// The program of the compiler's; destroyed with this.
class Compilation {
public:
    // what: for messages.
    Compilation(const std::string& source, std::string what) : what_(std::move(what)) {
        std::vector<const char*> texts, names;
        for (size_t i = 0; i < kCudaHeaderCount; ++i) {
            texts.push_back(kCudaHeaders[i].text);
            names.push_back(kCudaHeaders[i].name);
        }
        check(compiler_.create(&program_, source.c_str(), "lily.cu", static_cast<int>(names.size()), texts.data(),
                               names.data()));
    }
    Compilation(const Compilation&) = delete;
    Compilation& operator=(const Compilation&) = delete;
    ~Compilation() { compiler_.destroy(&program_); }

    void run(const std::vector<const char*>& options) {
        const auto outcome = compiler_.compile(program_, static_cast<int>(options.size()), options.data());
        check(outcome, outcome.ok() ? "" : ": " + log());
    }
    // Empty where there is none: it is for people.
    std::string log() const {
        size_t bytes = 0;
        if (!compiler_.log_size(program_, &bytes).ok()) return "";
        std::string text(bytes, '\0');
        if (!compiler_.log(program_, text.data()).ok()) return "";
        while (!text.empty() && text.back() == '\0') text.pop_back();
        return text;
    }
    std::string code() const {
        size_t bytes = 0;
        check(compiler_.cubin_size(program_, &bytes));
        std::string image(bytes, '\0');
        check(compiler_.cubin(program_, image.data()));
        return image;
    }

private:
    void check(const cuda::Outcome& outcome, const std::string& more = "") const {
        if (!outcome.ok())
            throw Error(ErrorKind::kDevice, "cuda: " + what_ + ": " + outcome.function + ": " +
                                                compiler_.error_string(outcome.result) + more);
    }

    const std::string what_;
    const cuda::Compiler& compiler_ = cuda::compiler();
    cuda::Program program_ = nullptr;
};

}  // namespace

std::string cuda_architecture(int major, int minor) {
    return "sm_" + std::to_string(10 * major + minor) + (major == 9 ? "a" : "");
}

void set_cuda_cache(std::string folder) {
    const std::lock_guard guard(cache_mutex);
    cache_place = std::move(folder);
}

std::string cuda_cache() {
    const std::lock_guard guard(cache_mutex);
    return cache_place;
}

CudaCompiler::CudaCompiler(std::string architecture, std::string folder)
    : architecture_(std::move(architecture)), folder_(std::move(folder)) {
    std::error_code error;
    if (!folder_.empty()) std::filesystem::create_directories(folder_, error);
    if (error) folder_.clear();
}

std::string CudaCompiler::version() const {
    int major = 0, minor = 0;
    if (const cuda::Outcome outcome = cuda::compiler().version(&major, &minor); !outcome.ok())
        throw Error(ErrorKind::kDevice, std::string("cuda: cannot ask the run-time compiler: ") + outcome.function +
                                            ": " + cuda::compiler().error_string(outcome.result));
    return std::to_string(major) + "." + std::to_string(minor);
}

CudaImage CudaCompiler::compile(const Variant& variant) const {
    return compile(variant, cuda_source(variant, architecture_));
}

CudaImage CudaCompiler::compile(const Variant& variant, const std::string& source) const {
    Compilation compilation(source, function_name(variant) + " does not compile for " + architecture_);
    const std::string architecture = "--gpu-architecture=" + architecture_;
    std::vector<const char*> options(std::begin(kOptions), std::end(kOptions));
    options.push_back(architecture.c_str());
    compilation.run(options);
    return {compilation.code(), compilation.log()};
}

// Everything that the code depends on is in the name.
std::string CudaCompiler::entry_of(const Variant& variant, const std::string& source) const {
    std::string text = source + architecture_ + version();
    for (const char* option : kOptions) text += option;
    return folder_ + "/" + function_name(variant) + "-" + architecture_ + "-" + hex(hash_of(text, kShaderHash)) +
           hex(hash_of(text)) + ".cubin";
}

CudaImage CudaCompiler::image(const Variant& variant) {
    const std::string source = cuda_source(variant, architecture_);
    if (folder_.empty()) return compile(variant, source);
    const std::string path = entry_of(variant, source);
    std::string kept;
    if (std::ifstream file(path, std::ios::binary); file)
        kept.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    constexpr size_t kSeal = 16;
    if (kept.size() > kSeal && hex(hash_of(std::string_view(kept).substr(kSeal))) == kept.substr(0, kSeal)) {
        ++hits_;
        return {kept.substr(kSeal), ""};
    }
    CudaImage made = compile(variant, source);
    // Renamed in one step, so that another process never reads half of it. Without room there is no entry.
    static std::atomic<uint32_t> writers{0};
    const std::string fresh = path + "." + std::to_string(getpid()) + "." + std::to_string(++writers);
    std::ofstream file(fresh, std::ios::binary);
    file << hex(hash_of(made.code)) << made.code;
    file.close();
    if (!file || std::rename(fresh.c_str(), path.c_str()) != 0) std::remove(fresh.c_str());
    return made;
}

}  // namespace lily
