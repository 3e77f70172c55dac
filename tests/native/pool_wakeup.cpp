// How long a pool's thread takes to begin what its caller shares out, in nanoseconds: prints the median and the 90th
// percentile while the thread spins, as between the stages of a plan, and when it sleeps.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "thread_pool.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Job {
    std::thread::id caller = std::this_thread::get_id();
    std::atomic<bool> begun{false};
    Clock::time_point begin;
};

// Two chunks: the caller's ends when the other thread has begun.
void task(void* context, uint32_t) {
    Job& job = *static_cast<Job*>(context);
    if (std::this_thread::get_id() == job.caller) {
        while (!job.begun.load(std::memory_order_acquire)) {
        }
    } else if (!job.begun.load(std::memory_order_relaxed)) {
        job.begin = Clock::now();
        job.begun.store(true, std::memory_order_release);
    }
}

void measure(lily::ThreadPool& pool, const char* name, int times, std::chrono::microseconds pause) {
    std::vector<int64_t> waits;
    for (int i = 0; i < times; ++i) {
        if (pause.count() > 0) std::this_thread::sleep_for(pause);
        Job job;
        const Clock::time_point start = Clock::now();
        pool.run(2, &task, &job);
        waits.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(job.begin - start).count());
    }
    std::sort(waits.begin(), waits.end());
    std::printf("%s %lld %lld\n", name, static_cast<long long>(waits[waits.size() / 2]),
                static_cast<long long>(waits[waits.size() * 9 / 10]));
}

}  // namespace

int main() {
    lily::ThreadPool pool(2);
    measure(pool, "warm-up", 2000, std::chrono::microseconds(0));
    measure(pool, "spinning", 10000, std::chrono::microseconds(0));
    measure(pool, "asleep", 200, std::chrono::microseconds(1000));
}
