// Memory that sequences share: pages of the cache, and snapshots of what a sequence carries beside them.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "device.h"

namespace lily {

// Which pages of the cache are in use, and by how many. Any thread may call any member: a session can be dropped while
// others work.
class PagePool {
public:
    explicit PagePool(uint32_t pages);

    // A page with one holder, if any is free.
    std::optional<uint32_t> take();
    void hold(std::span<const uint32_t> pages);
    void drop(std::span<const uint32_t> pages);
    bool shared(uint32_t page) const;
    uint32_t count_shared(std::span<const uint32_t> pages) const;
    uint32_t free() const;

private:
    mutable std::mutex mutex_;
    std::vector<uint32_t> free_;
    std::vector<uint32_t> holders_;  // of each page
};

// A sequence at one position. Its pages are held, never written: who goes on from it copies a page that is not full.
struct Snapshot {
    std::vector<uint32_t> tokens;
    size_t prompt_tokens = 0;  // those before the output that penalties count
    std::vector<uint32_t> pages;
    BufferId memory;  // recurrent state and logits
    uint64_t last_use = 0;
};

// Snapshots up to a number; the least recently used goes first. One that somebody else refers to stays.
// For one thread at a time, the one that has the device.
class SnapshotStore {
public:
    // state_bytes: of the memory of one snapshot, beside its pages.
    SnapshotStore(Device& device, PagePool& pages, uint64_t state_bytes, uint32_t most)
        : device_(device), pages_(pages), state_bytes_(state_bytes), most_(most) {}

    // The one of exactly these tokens; nullptr if there is none.
    std::shared_ptr<Snapshot> find(std::span<const uint32_t> tokens);
    // Makes it the most recently used one.
    void use(Snapshot& snapshot);
    // A new one, whose memory is to be filled; nullptr when there is no room.
    std::shared_ptr<Snapshot> add(std::span<const uint32_t> tokens, size_t prompt_tokens,
                                  std::span<const uint32_t> pages);
    void remove(const std::shared_ptr<Snapshot>& snapshot);
    // Makes room; false when nothing can go.
    bool evict();
    // When the device goes, and all its memory with it.
    void abandon();

    const std::list<std::shared_ptr<Snapshot>>& all() const { return all_; }
    // These two may be asked by any thread.
    uint64_t count() const { return count_.load(std::memory_order_relaxed); }
    uint64_t bytes() const { return count() * state_bytes_; }
    uint32_t most() const { return most_; }

private:
    Device& device_;
    PagePool& pages_;
    uint64_t state_bytes_;
    uint32_t most_;
    uint64_t clock_ = 0;
    std::list<std::shared_ptr<Snapshot>> all_;
    std::atomic<uint64_t> count_{0};  // of them
};

// How many tokens two sequences begin with in common.
size_t common_prefix(std::span<const uint32_t> tokens, std::span<const int32_t> ids);

}  // namespace lily
