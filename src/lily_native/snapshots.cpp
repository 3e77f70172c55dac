#include "snapshots.h"

#include <algorithm>

namespace lily {

PagePool::PagePool(uint32_t pages) : holders_(pages) {
    free_.reserve(pages);
    for (uint32_t i = pages; i-- > 0;) free_.push_back(i);
}

std::optional<uint32_t> PagePool::take() {
    const std::lock_guard guard(mutex_);
    if (free_.empty()) return std::nullopt;
    const uint32_t page = free_.back();
    free_.pop_back();
    holders_[page] = 1;
    return page;
}

void PagePool::hold(std::span<const uint32_t> pages) {
    const std::lock_guard guard(mutex_);
    for (uint32_t page : pages) ++holders_[page];
}

void PagePool::drop(std::span<const uint32_t> pages) {
    const std::lock_guard guard(mutex_);
    for (uint32_t page : pages)
        if (--holders_[page] == 0) free_.push_back(page);
}

bool PagePool::shared(uint32_t page) const {
    const std::lock_guard guard(mutex_);
    return holders_[page] > 1;
}

uint32_t PagePool::count_shared(std::span<const uint32_t> pages) const {
    const std::lock_guard guard(mutex_);
    return static_cast<uint32_t>(
        std::count_if(pages.begin(), pages.end(), [&](uint32_t page) { return holders_[page] > 1; }));
}

uint32_t PagePool::free() const {
    const std::lock_guard guard(mutex_);
    return static_cast<uint32_t>(free_.size());
}

size_t common_prefix(std::span<const uint32_t> tokens, std::span<const int32_t> ids) {
    const size_t most = std::min(tokens.size(), ids.size());
    size_t i = 0;
    while (i < most && tokens[i] == static_cast<uint32_t>(ids[i])) ++i;
    return i;
}

void SnapshotStore::use(Snapshot& snapshot) {
    snapshot.last_use = ++clock_;
}

std::shared_ptr<Snapshot> SnapshotStore::find(std::span<const uint32_t> tokens) {
    for (const auto& snapshot : all_) {
        if (!std::equal(snapshot->tokens.begin(), snapshot->tokens.end(), tokens.begin(), tokens.end())) continue;
        use(*snapshot);
        return snapshot;
    }
    return nullptr;
}

std::shared_ptr<Snapshot> SnapshotStore::add(std::span<const uint32_t> tokens, size_t prompt_tokens,
                                             std::span<const uint32_t> pages) {
    while (all_.size() >= most_)
        if (!evict()) return nullptr;
    auto made = std::make_shared<Snapshot>();
    made->tokens.assign(tokens.begin(), tokens.end());
    made->prompt_tokens = prompt_tokens;
    made->pages.assign(pages.begin(), pages.end());
    all_.push_back(made);
    try {
        made->memory = device_.allocate("snapshot", state_bytes_);
    } catch (...) {
        all_.pop_back();
        throw;
    }
    pages_.hold(pages);
    count_ = all_.size();
    use(*made);
    return made;
}

void SnapshotStore::remove(const std::shared_ptr<Snapshot>& snapshot) {
    const auto at = std::find(all_.begin(), all_.end(), snapshot);
    if (at == all_.end()) return;
    const std::shared_ptr<Snapshot> old = *at;
    all_.erase(at);
    count_ = all_.size();
    pages_.drop(old->pages);
    device_.release(old->memory);
}

bool SnapshotStore::evict() {
    const std::shared_ptr<Snapshot>* oldest = nullptr;
    for (const auto& snapshot : all_)
        if (snapshot.use_count() == 1 && (oldest == nullptr || snapshot->last_use < (*oldest)->last_use))
            oldest = &snapshot;
    if (oldest == nullptr) return false;
    remove(*oldest);
    return true;
}

void SnapshotStore::abandon() {
    all_.clear();
    count_ = 0;
}

}  // namespace lily
