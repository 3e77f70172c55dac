#include "control.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>

namespace cuda_double {
namespace {

struct Fault {
    std::string name;
    int64_t left = 0;
    Order order;
};

std::mutex mutex;
std::map<std::string, int64_t, std::less<>> calls, settings;
Fault fault;
std::string failed, first_misuse;

void copy(const std::string& from, char* text, size_t bytes) {
    std::snprintf(text, bytes, "%s", from.c_str());
}

}  // namespace

Order begin(std::string_view name) {
    const std::lock_guard guard(mutex);
    ++calls.try_emplace(std::string(name)).first->second;
    if (fault.left == 0 || (!fault.name.empty() && fault.name != name) || --fault.left > 0) return {};
    failed = name;
    return fault.order;
}

int64_t setting(std::string_view name, int64_t usual) {
    const std::lock_guard guard(mutex);
    const auto found = settings.find(name);
    return found == settings.end() ? usual : found->second;
}

void misuse(const char* format, ...) {
    char text[300];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    const std::lock_guard guard(mutex);
    if (first_misuse.empty()) first_misuse = text;
}

void lily_double_fail(const char* name, int64_t nth, int result, int manner) {
    const std::lock_guard guard(mutex);
    fault = {name, nth, {result, static_cast<Manner>(manner)}};
    failed.clear();
}

void lily_double_failed(char* text, size_t bytes) {
    const std::lock_guard guard(mutex);
    copy(failed, text, bytes);
}

int64_t lily_double_calls(const char* name) {
    const std::lock_guard guard(mutex);
    int64_t sum = 0;
    for (const auto& [each, count] : calls) sum += *name == '\0' || each == name ? count : 0;
    return sum;
}

void lily_double_set(const char* name, int64_t value) {
    const std::lock_guard guard(mutex);
    settings[name] = value;
}

void lily_double_reset() {
    const std::lock_guard guard(mutex);
    fault = {};
    failed.clear();
    calls.clear();
    settings.clear();
}

void lily_double_misuse(char* text, size_t bytes) {
    const std::lock_guard guard(mutex);
    copy(first_misuse, text, bytes);
    first_misuse.clear();
}

}  // namespace cuda_double
