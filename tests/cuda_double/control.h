// What tests tell the doubles of libcuda and libnvrtc, and what they ask them. Either library has a control of its own:
// nothing is shared between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace cuda_double {

// How a call fails.
enum Manner : int {
    kPlain,   // it returns the error and has done nothing
    kSticky,  // from then on everything in the context returns the error
    kLate,    // it succeeds; the next wait or copy finds the context in that state
};

struct Order {
    int result = 0;
    Manner manner = kPlain;
};

// Counts a call, and says whether it shall fail.
Order begin(std::string_view name);
int64_t setting(std::string_view name, int64_t usual);
// Remembers what the real library does not allow. The first one counts.
void misuse(const char* format, ...) __attribute__((format(printf, 1, 2)));

// By ctypes:
#define LILY_DOUBLE_EXPORT extern "C" __attribute__((visibility("default")))
// The n-th call from now on of this name, or of any where it is empty, fails. n = 0: none does.
LILY_DOUBLE_EXPORT void lily_double_fail(const char* name, int64_t nth, int result, int manner);
// Which call has failed since then; empty if none has.
LILY_DOUBLE_EXPORT void lily_double_failed(char* text, size_t bytes);
// Calls of this name, or all, since the last reset.
LILY_DOUBLE_EXPORT int64_t lily_double_calls(const char* name);
LILY_DOUBLE_EXPORT void lily_double_set(const char* name, int64_t value);
// Takes faults, settings and counts back; what is alive stays so.
LILY_DOUBLE_EXPORT void lily_double_reset();
// The first misuse since the last question, or nothing.
LILY_DOUBLE_EXPORT void lily_double_misuse(char* text, size_t bytes);

}  // namespace cuda_double
