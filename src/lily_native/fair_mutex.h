// A mutex whose waiters get it in the order in which they came, and may give up waiting.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace lily {

class FairMutex {
public:
    void lock() {
        lock([] {});
    }

    // Calls `poll` a few times a second while it waits; what that throws ends the waiting.
    template <class Poll>
    void lock(const Poll& poll) {
        Waiter self(*this);
        std::unique_lock guard(mutex_);
        if (!held_) {
            held_ = self.taken = true;
            return;
        }
        self.before = last_;
        (last_ != nullptr ? last_->next : first_) = &self;
        last_ = &self;
        self.waiting = true;
        while (self.waiting) {
            // The system's clock, because thread sanitizers know the wait for no other.
            self.turn.wait_until(guard, std::chrono::system_clock::now() + kPoll);
            if (!self.waiting) break;
            guard.unlock();
            poll();
            guard.lock();
        }
        self.taken = true;
    }

    void unlock() {
        const std::lock_guard guard(mutex_);
        pass_on();
    }

private:
    static constexpr std::chrono::milliseconds kPoll{50};

    // Lies on the waiting thread's stack, so that waiting allocates nothing. A thread can end in poll(), by an
    // exception or by being unwound: it leaves the queue then, or passes on what it was given meanwhile.
    struct Waiter {
        explicit Waiter(FairMutex& owner) : mutex(owner) {}
        Waiter(const Waiter&) = delete;
        Waiter& operator=(const Waiter&) = delete;
        ~Waiter() {
            if (taken) return;
            const std::lock_guard guard(mutex.mutex_);
            if (waiting)
                mutex.remove(*this);
            else
                mutex.pass_on();
        }

        FairMutex& mutex;
        Waiter *before = nullptr, *next = nullptr;
        std::condition_variable turn;
        bool waiting = false;
        bool taken = false;
    };

    void remove(Waiter& waiter) {
        (waiter.before != nullptr ? waiter.before->next : first_) = waiter.next;
        (waiter.next != nullptr ? waiter.next->before : last_) = waiter.before;
    }

    void pass_on() {
        held_ = first_ != nullptr;
        if (!held_) return;
        Waiter& next = *first_;
        remove(next);
        next.waiting = false;
        next.turn.notify_one();  // under the mutex: the waiter may be gone right after
    }

    std::mutex mutex_;
    Waiter *first_ = nullptr, *last_ = nullptr;
    bool held_ = false;
};

}  // namespace lily
