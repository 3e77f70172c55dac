// The state behind double.h. Everything is an atomic or under the one mutex: tests change settings while queues run.
// The atomics order nothing, so that they hide no race of the program from the sanitizer.
#include "control.h"

#include <array>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "double.h"
#include "objc_runtime.h"

namespace metal_double {
namespace {

template <class Enum>
constexpr size_t kSize = static_cast<size_t>(Enum::kCount);

struct SettingInfo {
    const char* name;
    int64_t value;
};
constexpr SettingInfo kSettings[] = {
    {"width", 1},
    {"threads", 2},
    {"order", 0},
    {"seed", 1},
    {"hazards", 1},
    {"latency_us", 0},
    {"hold", 0},
    {"dispatch_ns", 0},
    {"late_handlers", 0},
    {"handler_observes", 1},
    {"compile_warnings", 1},
    {"execution_error", 1},
    {"device", 0},
    {"os_major", 15},
    {"os_minor", 5},
    {"os_patch", 0},
    {"apple_family", 9},
    {"metal4", 0},
    {"max_buffer_length", int64_t{8} << 30},
    {"working_set", int64_t{12} << 30},
    {"max_threads", 1024},
    {"max_command_buffers", 64},
    {"constant_alignment", 4},
    {"capture_supported", 1},
};
static_assert(std::size(kSettings) == kSize<Setting>);

struct TextInfo {
    const char* name;
    const char* value;
};
constexpr TextInfo kTexts[] = {
    {"os_build", "24F74"},
    {"gpu_name", "Apple M4 Double"},
    {"caches_directory", ""},
    {"objects_directory", ""},
};
static_assert(std::size(kTexts) == kSize<Text>);

constexpr const char* kFailures[] = {
    "device",        "queue",           "buffer",       "library",     "function",
    "pipeline",      "pipeline_lookup", "archive_open", "archive_add", "archive_serialize",
    "residency_set", "command_buffer",  "encoder",      "execution",   "capture",
};
static_assert(std::size(kFailures) == kSize<Failure>);

constexpr const char* kCounters[] = {
    "buffer_bytes",
    "resident_buffers",
    "attached_residency_sets",
    "in_flight",
    "libraries",
    "pipelines_compiled",
    "pipelines_from_archive",
    "archive_misses",
    "archives_opened",
    "archives_saved",
    "command_buffers",
    "failed_command_buffers",
    "encoders",
    "dispatches",
    "barriers",
    "max_in_flight",
    "unchecked_command_buffers",
    "captures",
    "captured_command_buffers",
};
static_assert(std::size(kCounters) == kSize<Counter>);

struct LiveKind {
    const char* name;
    const char* class_name;
};
constexpr LiveKind kLiveKinds[] = {
    {"live_devices", "SoftDevice"},
    {"live_queues", "SoftQueue"},
    {"live_libraries", "SoftLibrary"},
    {"live_functions", "SoftFunction"},
    {"live_pipelines", "SoftPipeline"},
    {"live_archives", "SoftArchive"},
    {"live_residency_sets", "SoftResidencySet"},
    {"live_buffers", "SoftBuffer"},
    {"live_command_buffers", "SoftCommandBuffer"},
    {"live_encoders", "SoftEncoder"},
    {"live_objects", nullptr},
};

struct State {
    State() { reset(); }

    void reset() {
        for (size_t i = 0; i < settings.size(); ++i) settings[i].store(kSettings[i].value);
        for (std::atomic<int64_t>& failure : failures) failure.store(0);
        for (size_t i = static_cast<size_t>(Counter::kLibraries); i < counters.size(); ++i) counters[i].store(0);
        without_pool_before = lily_objc::autoreleased_without_pool();
        skipped_before = lily_objc::skipped_pools();
        const std::lock_guard lock(mutex);
        for (size_t i = 0; i < texts.size(); ++i) texts[i] = kTexts[i].value;
        threadgroup_memory.clear();
    }

    std::array<std::atomic<int64_t>, kSize<Setting>> settings;
    std::array<std::atomic<int64_t>, kSize<Failure>> failures;
    std::array<std::atomic<int64_t>, kSize<Counter>> counters{};
    std::atomic<int64_t> without_pool_before{0}, skipped_before{0};
    std::mutex mutex;
    std::array<std::string, kSize<Text>> texts;
    std::map<std::string, int64_t, std::less<>> threadgroup_memory;
};

// Never destroyed: queues may still run while the process ends.
State& state() {
    static auto* instance = new State;
    return *instance;
}

template <class Table>
size_t find(const Table& table, std::string_view name, const auto& name_of) {
    size_t i = 0;
    while (i < std::size(table) && name != name_of(table[i])) ++i;
    return i;
}

constexpr auto kNameOf = [](const auto& info) { return info.name; };
constexpr auto kItself = [](const char* name) { return name; };

// What follows a prefix such as "fail:".
std::optional<std::string_view> after(std::string_view prefix, std::string_view name) {
    if (name.substr(0, prefix.size()) != prefix) return std::nullopt;
    return name.substr(prefix.size());
}

}  // namespace

int64_t setting(Setting which) {
    return state().settings[static_cast<size_t>(which)].load(std::memory_order_relaxed);
}

int64_t system_major() {
    const int64_t told = setting(Setting::kOsMajor);
    return told == 16 ? 26 : told;
}

std::string text(Text which) {
    const std::lock_guard lock(state().mutex);
    return state().texts[static_cast<size_t>(which)];
}

int64_t threadgroup_memory(std::string_view kernel) {
    const std::lock_guard lock(state().mutex);
    const auto entry = state().threadgroup_memory.find(kernel);
    return entry == state().threadgroup_memory.end() ? 0 : entry->second;
}

bool fails(Failure which) {
    std::atomic<int64_t>& left = state().failures[static_cast<size_t>(which)];
    int64_t count = left.load(std::memory_order_relaxed);
    while (count > 0)
        if (left.compare_exchange_weak(count, count - 1, std::memory_order_relaxed)) return count == 1;
    return false;
}

int64_t add(Counter which, int64_t difference) {
    return state().counters[static_cast<size_t>(which)].fetch_add(difference, std::memory_order_relaxed) + difference;
}

void raise_to(Counter which, int64_t value) {
    std::atomic<int64_t>& counter = state().counters[static_cast<size_t>(which)];
    int64_t before = counter.load(std::memory_order_relaxed);
    while (before < value && !counter.compare_exchange_weak(before, value, std::memory_order_relaxed)) {
    }
}

void misuse(const char* format, ...) {
    std::fputs("metal double: misuse: ", stderr);
    va_list list;
    va_start(list, format);
    std::vfprintf(stderr, format, list);
    va_end(list);
    std::fputc('\n', stderr);
    std::abort();
}

}  // namespace metal_double

using namespace metal_double;

#define EXPORTED __attribute__((visibility("default")))

EXPORTED int64_t lily_double_set(const char* name, int64_t value) {
    if (const auto kind = after("fail:", name)) {
        const size_t i = find(kFailures, *kind, kItself);
        return i == std::size(kFailures) ? -1 : state().failures[i].exchange(value);
    }
    if (const auto kernel = after("threadgroup_memory:", name)) {
        const std::lock_guard lock(state().mutex);
        return std::exchange(state().threadgroup_memory[std::string(*kernel)], value);
    }
    const size_t i = find(kSettings, name, kNameOf);
    return i == std::size(kSettings) ? -1 : state().settings[i].exchange(value);
}

EXPORTED int64_t lily_double_set_text(const char* name, const char* value) {
    const size_t i = find(kTexts, name, kNameOf);
    if (i == std::size(kTexts)) return -1;
    const std::lock_guard lock(state().mutex);
    state().texts[i] = value;
    return 0;
}

EXPORTED int64_t lily_double_count(const char* name) {
    if (const auto type = after("live:", name)) return lily_objc::live_objects(std::string(*type).c_str());
    const std::string_view wanted = name;
    if (wanted == "live_blocks") return lily_objc::live_blocks();
    if (wanted == "open_pools") return lily_objc::open_pools();
    if (wanted == "skipped_pools") return lily_objc::skipped_pools() - state().skipped_before.load();
    if (wanted == "autoreleased_without_pool")
        return lily_objc::autoreleased_without_pool() - state().without_pool_before.load();
    if (const size_t i = find(kLiveKinds, wanted, kNameOf); i < std::size(kLiveKinds))
        return lily_objc::live_objects(kLiveKinds[i].class_name);
    const size_t i = find(kCounters, wanted, kItself);
    return i == std::size(kCounters) ? -1 : state().counters[i].load(std::memory_order_relaxed);
}

EXPORTED void lily_double_reset(void) {
    state().reset();
}
