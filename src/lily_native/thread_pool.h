// Threads that execute the chunks of one job together with the caller. Between jobs they spin for a moment,
// because the next stage of a plan usually follows within microseconds, and then sleep: an idle engine costs
// no processor time.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace lily {

// Physical cores that this process may use, at least 1; fewer where a container's quota allows fewer.
uint32_t usable_cores();

class ThreadPool {
public:
    using Task = void (*)(void* context, uint32_t chunk);

    // threads counts the caller: a pool of 1 has no thread of its own.
    explicit ThreadPool(uint32_t threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    uint32_t size() const { return static_cast<uint32_t>(threads_.size()) + 1; }
    // The threads do not exist in a process forked from the one that made them; there, do not even destroy
    // the pool.
    bool usable() const;

    // Calls task(context, chunk) for every chunk below `chunks` and returns when all are finished. One caller
    // at a time. Rethrows the first exception of a task; the other chunks still run.
    void run(uint32_t chunks, Task task, void* context);

private:
    void stop();
    bool claim(uint32_t& chunk);
    void execute(uint32_t chunk) noexcept;
    void work();
    bool wait_for_work();
    void wait_for_end(uint32_t chunks);

    // The job in one word, chunk count high and next chunk low, so that a chunk is claimed only from the job
    // it is of: after a claim that job cannot end, and task_ and context_ stay what they are.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> finished_{0};
    alignas(64) std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::atomic<bool> caller_sleeps_{false};
    Task task_ = nullptr;
    void* context_ = nullptr;
    uint32_t chunks_ = 0;
    std::mutex mutex_;
    std::condition_variable work_ready_, job_done_;
    std::exception_ptr error_;  // under mutex_
    pid_t owner_;
    std::vector<std::thread> threads_;
};

}  // namespace lily
