#include "thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <set>
#include <string>
#include <utility>

#include "error.h"
#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace lily {
namespace {

constexpr auto kSpinTime = std::chrono::microseconds(50);

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins until done() or for kSpinTime; reads the clock now and then only.
template <class Done>
bool spin(const Done& done) {
    const auto end = std::chrono::steady_clock::now() + kSpinTime;
    do {
        for (int i = 0; i < 64; ++i) {
            if (done()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

#if defined(__linux__)
std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

// Processors of a core name the same siblings.
uint32_t allowed_cores() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return std::thread::hardware_concurrency();
    std::set<std::string> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed)) continue;
        const std::string id = std::to_string(cpu);
        const std::string siblings = first_line("/sys/devices/system/cpu/cpu" + id + "/topology/thread_siblings_list");
        cores.insert(siblings.empty() ? id : siblings);
    }
    return static_cast<uint32_t>(cores.size());
}

// Processors' worth of time that the control group grants, or a large number.
uint32_t quota_cores() {
    std::ifstream file("/sys/fs/cgroup/cpu.max");
    double quota = 0, period = 0;
    if (!(file >> quota >> period) || quota <= 0 || period <= 0) return UINT32_MAX;
    return static_cast<uint32_t>(std::max(1.0, std::ceil(quota / period)));
}
#endif

}  // namespace

uint32_t usable_cores() {
#if defined(__linux__)
    return std::max(1u, std::min(allowed_cores(), quota_cores()));
#elif defined(__APPLE__)
    // Performance cores only: one slow core would hold up every stage.
    int count = 0;
    size_t bytes = sizeof count;
    if (sysctlbyname("hw.perflevel0.physicalcpu", &count, &bytes, nullptr, 0) == 0 && count > 0)
        return static_cast<uint32_t>(count);
    return std::max(1u, std::thread::hardware_concurrency());
#else
    return std::max(1u, std::thread::hardware_concurrency());
#endif
}

ThreadPool::ThreadPool(uint32_t threads) : owner_(getpid()) {
    try {
        for (uint32_t i = 1; i < threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (const std::exception& reason) {  // a limit on processes or memory
        const size_t started = threads_.size();
        stop();
        throw Error(ErrorKind::kOutOfMemory, "cannot start " + std::to_string(threads) + " threads, only " +
                                                 std::to_string(started + 1) + ": " + reason.what());
    }
}

ThreadPool::~ThreadPool() {
    stop();
}

void ThreadPool::stop() {
    {
        const std::lock_guard lock(mutex_);
        stop_.store(true);
    }
    work_ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

bool ThreadPool::usable() const {
    return threads_.empty() || getpid() == owner_;
}

bool ThreadPool::claim(uint32_t& chunk) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(ticket) < static_cast<uint32_t>(ticket >> 32)) {
        if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
            chunk = static_cast<uint32_t>(ticket);
            return true;
        }
    }
    return false;
}

void ThreadPool::execute(uint32_t chunk) noexcept {
    try {
        task_(context_, chunk);
    } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
    }
    const uint32_t chunks = chunks_;  // the job may be gone once the last chunk is counted
    if (finished_.fetch_add(1) + 1 == chunks && caller_sleeps_.load()) {
        const std::lock_guard lock(mutex_);
        job_done_.notify_one();
    }
}

void ThreadPool::work() {
    uint32_t chunk = 0;
    while (wait_for_work()) {
        while (claim(chunk)) execute(chunk);
    }
}

// False when the pool ends.
bool ThreadPool::wait_for_work() {
    const auto ready = [this] {
        const uint64_t ticket = ticket_.load();
        return static_cast<uint32_t>(ticket) < static_cast<uint32_t>(ticket >> 32) || stop_.load();
    };
    if (!spin(ready)) {
        std::unique_lock lock(mutex_);
        sleepers_.fetch_add(1);
        work_ready_.wait(lock, ready);
        sleepers_.fetch_sub(1);
    }
    return !stop_.load();
}

void ThreadPool::wait_for_end(uint32_t chunks) {
    const auto done = [this, chunks] { return finished_.load() == chunks; };
    if (spin(done)) return;
    std::unique_lock lock(mutex_);
    caller_sleeps_.store(true);
    job_done_.wait(lock, done);
    caller_sleeps_.store(false);
}

void ThreadPool::run(uint32_t chunks, Task task, void* context) {
    if (chunks == 0) return;
    if (threads_.empty() || chunks == 1) {
        for (uint32_t chunk = 0; chunk < chunks; ++chunk) task(context, chunk);
        return;
    }
    task_ = task;
    context_ = context;
    chunks_ = chunks;
    finished_.store(0);
    ticket_.store(static_cast<uint64_t>(chunks) << 32);
    // The order of these two accesses and of their mirror images in wait_for_work() makes a lost wake-up
    // impossible.
    if (const uint32_t sleepers = sleepers_.load(); sleepers > 0) {
        {
            const std::lock_guard lock(mutex_);
        }
        for (uint32_t i = std::min(sleepers, chunks - 1); i > 0; --i) work_ready_.notify_one();
    }
    uint32_t chunk = 0;
    while (claim(chunk)) execute(chunk);
    wait_for_end(chunks);
    std::exception_ptr error;
    {
        const std::lock_guard lock(mutex_);
        std::swap(error, error_);
    }
    if (error) std::rethrow_exception(error);
}

}  // namespace lily
