// Engine: one model on one device, shared by its sessions. Owns weights, pools and recorded plans.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cancel.h"
#include "device.h"
#include "fair_mutex.h"
#include "model.h"
#include "ring.h"
#include "snapshots.h"

namespace lily {

// Where the bytes of one checkpoint tensor are.
struct TensorSource {
    std::string name;
    std::string dtype;  // safetensors name
    std::string path;
    uint64_t offset;
    uint64_t bytes;
};

inline constexpr uint64_t kSnapshotCount = 16;  // for which there is memory unless an option says otherwise

struct EngineOptions {
    std::string device = "auto";
    uint32_t context = 0;
    uint32_t chunk = 0;  // 0: what suits the device
    uint32_t sessions = 0;
    uint32_t threads = 0;  // 0: one per physical core
    uint32_t shuffle = 0;  // of a CPU device, for tests
    uint32_t tile = 0;     // rows of every matrix tile; 0: what suits the device
    std::optional<uint64_t> snapshot_bytes = std::nullopt;
    uint64_t memory_limit = UINT64_MAX;  // pages of the cache beyond one session's exist as far as it allows
};

// Bytes that an engine takes. kv is what one session needs at full context; pages are committed as they are used, on
// GPUs when the pool is made. snapshots are taken as they are made.
struct MemoryPlan {
    uint64_t weights = 0;
    uint64_t kv = 0;
    uint64_t state = 0;
    uint64_t logits = 0;
    uint64_t scratch = 0;
    uint64_t snapshots = 0;

    uint64_t total() const { return weights + kv + state + logits + scratch + snapshots; }
};

MemoryPlan plan_memory(const Config& config, const EngineOptions& options);

// The pass that decodes the token at `position`.
Pass decode_pass(const Capacity& capacity, uint32_t position);

// A recorded plan of an engine with these options: "decode" (of the context's last token), "prefill", "greedy" or
// "sampled". Needs neither weights nor a device; kValue for another name.
Plan named_plan(const Config& config, const EngineOptions& options, const std::string& name);

// By .metal file, the text that a Metal device would compile for this model.
std::map<std::string, std::string> metal_sources(const Config& config, const EngineOptions& options, bool tensor_ops);

// Rejects options that make no sense (kValue) and names the device that "auto" means (kUnsupported if unknown).
std::string choose_device(const EngineOptions& options);

struct Picked {
    uint32_t token;
    float logprob;  // under the model's own distribution, before penalties and temperature
};

// One step more would write over the generation that the session's caller is at.
inline constexpr uint32_t kMostSteps = GENERATIONS - 1;

// Steps of one session ahead of what its caller has seen. They end when another call needs the device: then those in
// flight become ready ones, and nothing is lost.
struct StepQueue {
    struct Flying {
        Ticket ticket;
        uint32_t place;  // in the token ring
    };
    Ring<Picked, kMostSteps> ready;
    Ring<Flying, kMostSteps> flying;
    std::exception_ptr failure;  // of steps that ended while another call had the device

    size_t size() const { return ready.size() + flying.size(); }
};

using Progress = std::function<void(uint64_t done, uint64_t total)>;

// Every member may be called from any thread; calls wait for each other.
class Engine {
public:
    // Reads the weights; calls `progress` on this thread, which may throw to give up.
    Engine(const Config& config, const std::vector<TensorSource>& tensors, const EngineOptions& options,
           const Progress& progress);

    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Gives the memory back. Sessions that remain throw kLogic from then on.
    void close();

    const Config& config() const { return model_.config; }
    const Capacity& capacity() const { return model_.capacity; }
    const MemoryPlan& memory() const { return memory_; }
    const std::string& device_name() const { return device_name_; }
    const std::vector<std::pair<std::string, std::string>>& device_info() const { return device_info_; }
    // Most bytes that this engine takes when all its pages and snapshots are in use.
    uint64_t most_memory() const;

    // Called a few times a second by threads that wait for the engine; what it throws ends their waiting.
    void set_interrupt(std::function<void()> interrupt) { interrupt_ = std::move(interrupt); }

    struct Cached {
        uint64_t snapshots;  // their number
        uint64_t bytes;      // of their memory
        uint64_t pages;      // of the cache, in use
        uint64_t page_bytes;
    };
    // Does not wait for the engine.
    Cached cached() const;
    size_t free_sessions();

private:
    friend class Session;

    enum class Recorded { kDecode, kPrefill, kScore, kTail, kTop };
    // What a plan is recorded for: rows, blocks and the like. Numbers, because every step looks two plans up.
    using PlanKey = std::tuple<Recorded, uint32_t, uint32_t>;

    using Guard = std::unique_lock<FairMutex>;
    // Throws kLogic when the engine is closed or belongs to the parent process.
    void check_usable() const;
    // Waits for the engine, behind those who came before; throws kLogic when it is closed or belongs to the parent
    // process, kCancelled when the flag says so meanwhile.
    Guard lock(const CancelFlag* flag = nullptr);

    // Takes all memory; returns where the checkpoint's tensors go.
    std::vector<TensorTarget> allocate(const EngineOptions& options);
    // Compiles what any session will need.
    void compile();
    void load(const std::vector<TensorTarget>& targets, const std::vector<TensorSource>& tensors, uint32_t threads,
              const Progress& progress);

    const Program& body(const Pass& pass);
    const Program& score(uint32_t rows, uint32_t top);
    const Program& tail(Tail kind);
    const Program& top(uint32_t count);
    // Gives up a snapshot, so that pages may become free; kOutOfMemory when there is none.
    void make_room();
    void copy_page(uint32_t from, uint32_t to);
    // Where the state that a session carries lies, of its own and of a snapshot; in one order.
    std::vector<SlotRef> state_of(uint32_t session, uint32_t generation) const;
    std::vector<SlotRef> state_of(const Snapshot& snapshot) const;
    void copy_state(const std::vector<SlotRef>& from, const std::vector<SlotRef>& to);

    // Finds the plan that `record` makes, which is made ready at its first use.
    template <class Record>
    const Program& prepared(const PlanKey& key, const Record& record);

    // Queued steps: starts one, takes the oldest's token, or ends the queue. A failure loses the steps in flight and
    // no more: they can be started again.
    void start_step(const std::shared_ptr<StepQueue>& queue, const Program& tail, const Program& body, uint32_t place);
    Picked finish_step(StepQueue& queue);
    void settle();
    Picked read_ring(uint32_t place);

    // The pass that holds `rows` rows of a prompt.
    Pass prefill_pass(uint32_t rows) const;

    template <class T>
    void write(Slot<T> slot, std::span<const T> values);
    template <class T>
    void read(Slot<T> slot, std::span<T> values);

    FairMutex mutex_;
    std::function<void()> interrupt_;
    std::atomic<bool> closed_{false};
    pid_t process_;
    std::unique_ptr<Device> device_;
    Model model_;
    MemoryPlan memory_;
    std::string device_name_;
    std::vector<std::pair<std::string, std::string>> device_info_;
    std::map<PlanKey, std::unique_ptr<Program>> programs_;
    std::shared_ptr<StepQueue> running_;  // the queue whose steps are in flight, if any are
    std::mutex pools_;  // of the list; held for moments only, so that a session can be dropped while others work
    std::vector<uint32_t> free_sessions_;
    std::optional<PagePool> pages_;
    std::optional<SnapshotStore> snapshots_;
};

template <class T>
void Engine::write(Slot<T> slot, std::span<const T> values) {
    if (values.size() > slot.count) throw_slice_error(0, values.size(), slot.count);
    if (!values.empty()) device_->write(slot.buffer, slot.offset, values.data(), values.size_bytes());
}

template <class T>
void Engine::read(Slot<T> slot, std::span<T> values) {
    if (values.size() > slot.count) throw_slice_error(0, values.size(), slot.count);
    if (!values.empty()) device_->read(slot.buffer, slot.offset, values.data(), values.size_bytes());
}

}  // namespace lily
