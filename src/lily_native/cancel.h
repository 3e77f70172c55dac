// Tells a call that it is over: because somebody said so, or because its time is up.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace lily {

// Any thread may call any member.
class CancelFlag {
public:
    bool raised() const { return raised_.load(std::memory_order_relaxed); }
    void raise() { raised_.store(true, std::memory_order_relaxed); }

    // Begins to count; `seconds` later the flag has expired.
    void expire_after(double seconds) {
        const double span = seconds < kMostSeconds ? seconds : kMostSeconds;  // NaN too
        deadline_.store(now() + static_cast<int64_t>(span * 1e9), std::memory_order_relaxed);
    }
    bool expired() const { return now() >= deadline_.load(std::memory_order_relaxed); }
    bool over() const { return raised() || expired(); }

private:
    static constexpr double kMostSeconds = 1e9;

    static int64_t now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }

    std::atomic<bool> raised_{false};
    std::atomic<int64_t> deadline_{INT64_MAX};
};

}  // namespace lily
