// What a device with a queue of its own keeps about the work it was given: which submissions have ended, what went
// wrong, and how long kernels took. Plain C++: the callbacks of a GPU's driver and the threads that wait meet here.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "device.h"
#include "error.h"

namespace lily {

// Submissions that have not ended. Any thread may call any member.
class Flights {
public:
    // A submission is being encoded; it ends when finish() was called once for this and once for every add().
    void start(Ticket ticket);
    void add(Ticket ticket);
    // `problem` is empty when all went well. The problem of the earliest submission counts.
    void finish(Ticket ticket, const std::string& problem, ErrorKind kind);
    // As Device::wait.
    void wait(Ticket ticket);
    // After encoding has failed: waits for the parts that were started and forgets what became of them.
    void abandon(Ticket ticket);
    // Returns when nothing is in flight.
    void wait_idle();
    // From now on nothing works any more: wait() and check() throw kDevice with this message.
    void lose(const std::string& message);
    void check();

private:
    struct Flight {
        Ticket ticket;
        uint32_t open;
    };
    struct Failure {
        Ticket ticket;
        ErrorKind kind;
        std::string message;
    };
    void wait_for(std::unique_lock<std::mutex>& guard, Ticket ticket);

    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Flight> flights_;  // a few at a time, so its memory is soon all there
    std::optional<Failure> failure_;
    std::string lost_;
};

// Whether LILY_DEBUG mentions a word.
bool debug_wants(std::string_view word);

// Device time by kernel.
class Trace {
public:
    void add(const std::string& kernel, double seconds);
    // Writes a table to the standard error stream, longest first.
    void print();

private:
    struct Entry {
        uint64_t count = 0;
        double seconds = 0;
    };

    std::mutex mutex_;
    std::map<std::string, Entry> entries_;
};

}  // namespace lily
