#include "submissions.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace lily {

void Flights::start(Ticket ticket) {
    const std::lock_guard guard(mutex_);
    flights_.push_back({ticket, 1});
}

void Flights::add(Ticket ticket) {
    const std::lock_guard guard(mutex_);
    for (Flight& flight : flights_)
        if (flight.ticket == ticket) ++flight.open;
}

void Flights::finish(Ticket ticket, const std::string& problem, ErrorKind kind) {
    const std::lock_guard guard(mutex_);
    for (Flight& flight : flights_)
        if (flight.ticket == ticket) --flight.open;
    const auto first_open = std::find_if(flights_.begin(), flights_.end(), [](const Flight& f) { return f.open > 0; });
    flights_.erase(flights_.begin(), first_open);
    // Devices need not report in order.
    if (!problem.empty() && (!failure_ || ticket < failure_->ticket)) failure_ = Failure{ticket, kind, problem};
    changed_.notify_all();
}

void Flights::wait_for(std::unique_lock<std::mutex>& guard, Ticket ticket) {
    changed_.wait(guard, [&] { return flights_.empty() || flights_.front().ticket > ticket; });
}

void Flights::wait(Ticket ticket) {
    std::unique_lock guard(mutex_);
    wait_for(guard, ticket);
    if (!failure_ || failure_->ticket > ticket) return;
    // What runs behind a failure is worth nothing: the caller may change everything once it knows.
    changed_.wait(guard, [&] { return flights_.empty(); });
    const Failure failure = *std::exchange(failure_, std::nullopt);
    if (!lost_.empty()) throw Error(ErrorKind::kDevice, lost_);
    throw Error(failure.kind, failure.message);
}

void Flights::lose(const std::string& message) {
    const std::lock_guard guard(mutex_);
    lost_ = message;
}

void Flights::check() {
    const std::lock_guard guard(mutex_);
    if (!lost_.empty()) throw Error(ErrorKind::kDevice, lost_);
}

void Flights::abandon(Ticket ticket) {
    finish(ticket, "", ErrorKind::kDevice);
    std::unique_lock guard(mutex_);
    wait_for(guard, ticket);
    if (failure_ && failure_->ticket == ticket) failure_.reset();
}

void Flights::wait_idle() {
    std::unique_lock guard(mutex_);
    changed_.wait(guard, [&] { return flights_.empty(); });
}

bool debug_wants(std::string_view word) {
    const char* text = std::getenv("LILY_DEBUG");
    return text != nullptr && std::string_view(text).find(word) != std::string_view::npos;
}

void Trace::add(const std::string& kernel, double seconds) {
    const std::lock_guard guard(mutex_);
    Entry& entry = entries_[kernel];
    ++entry.count;
    entry.seconds += seconds;
}

void Trace::print() {
    const std::lock_guard guard(mutex_);
    std::vector<std::pair<std::string, Entry>> rows(entries_.begin(), entries_.end());
    std::sort(rows.begin(), rows.end(),
              [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
    std::fprintf(stderr, "%-40s %10s %12s %10s\n", "kernel", "launches", "total ms", "mean us");
    for (const auto& [kernel, entry] : rows)
        std::fprintf(stderr, "%-40s %10llu %12.3f %10.2f\n", kernel.c_str(),
                     static_cast<unsigned long long>(entry.count), entry.seconds * 1e3,
                     entry.seconds * 1e6 / static_cast<double>(entry.count));
}

}  // namespace lily
