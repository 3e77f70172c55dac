// Session: one sequence of tokens on an engine, with its cache pages, recurrent state and sampling parameters.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine.h"

namespace lily {

struct Sampling {
    SampleParams params;
    std::vector<std::pair<uint32_t, float>> bias;  // distinct ids
};

struct Scores {
    uint32_t taken = 0;
    std::vector<float> logprobs;      // [taken]
    std::vector<uint32_t> top_ids;    // [taken, top]
    std::vector<float> top_logprobs;  // [taken, top]
};

// Every member may be called from any thread; calls wait for the engine.
class Session {
public:
    // Throws kLogic when all of the engine's sessions are in use.
    explicit Session(std::shared_ptr<Engine> engine);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    // Tokens fed so far. Does not wait for the engine.
    uint32_t position() const { return position_.load(std::memory_order_relaxed); }

    // Forgets all tokens.
    void reset();
    // Gives the session's place back; everything but close() throws from then on.
    void close();

    // A session of its own that goes on from here: full pages are shared, the rest is copied.
    std::unique_ptr<Session> fork();
    // Keeps this position in the engine's snapshots; `pinned` until the session forgets it, else as long as there is
    // room. False if there is none; kOutOfMemory when it was to be pinned.
    bool snapshot(bool pinned);
    // Goes back to a position of which there is a snapshot, or to 0; kValue for others.
    void rewind(uint32_t position);
    // Those positions, ascending.
    std::vector<uint32_t> checkpoints();

    // How much of a prompt a session need not read.
    struct Reuse {
        uint32_t tokens;   // those the session holds now
        uint32_t common;   // those that the prompt has in common with what was read before, at best
        int64_t expected;  // the token that followed there; -1 if none did
    };
    // Makes the session hold the longest beginning of `ids` whose state is there, and nothing else. What it held
    // becomes a snapshot, if there is room.
    Reuse restart(std::span<const int32_t> ids, const CancelFlag* flag);

    struct Pages {
        uint32_t own, shared;
    };
    Pages pages();

    // All there is to a session, for files: its tokens, and parts that are read and written a piece at a time.
    std::vector<uint32_t> tokens();
    uint32_t prompt_tokens();
    std::vector<StatePart> parts(uint32_t tokens);
    void read_part(uint32_t part, uint64_t offset, std::span<std::byte> to);
    // begin_load() forgets everything and makes room; until end_load() gives the session its tokens, everything but
    // write_part() and close() throws.
    void begin_load(uint32_t tokens);
    void write_part(uint32_t part, uint64_t offset, std::span<const std::byte> from);
    void end_load(std::span<const int32_t> tokens, uint32_t prompt_tokens);

    // Feeds a bounded chunk of ids and returns how many; the logits are then those of the last one.
    uint32_t prefill(std::span<const int32_t> ids, const CancelFlag* flag = nullptr);
    // As prefill, with log probabilities: targets[i] is the token expected after ids[i].
    Scores score(std::span<const int32_t> ids, std::span<const int32_t> targets, uint32_t top);

    // As prefill, in one pass of at most a chunk, which `run` carries out: for those who look into a pass.
    using PassRunner = std::function<void(Device&, const Model&, const Pass&)>;
    void prefill_by(std::span<const int32_t> ids, const PassRunner& run);

    void set_sampling(const Sampling& sampling);
    // Picks a token from the logits and feeds it. The device may go on with as many as `ahead` further ones while the
    // caller looks at this one; they are given up if the caller does something else.
    Picked step(uint32_t ahead, const CancelFlag* flag = nullptr);

    // The newest token fed; kLogic before any.
    uint32_t last_token();

    std::vector<float> logits();
    // The k most likely next tokens, most likely first.
    std::vector<Picked> top(uint32_t k);

private:
    struct Unplaced {};  // a session without a place yet
    Session(std::shared_ptr<Engine> engine, Unplaced);
    void take_place();
    // The engine's lock. lock() ends every queue of steps, lock_running() all but the session's own.
    Engine::Guard lock(const CancelFlag* flag = nullptr);
    Engine::Guard lock_running(const CancelFlag* flag = nullptr, bool loads = false);
    void check_ids(std::span<const int32_t> ids) const;
    void check_room(size_t tokens) const;
    uint32_t chunk_of(size_t tokens) const;
    void take_pages(uint32_t tokens);
    void drop_spare_pages();
    void take_page(size_t place);
    void release_pages();
    void write_table(size_t first, std::span<const uint32_t> pages);
    void forget();
    void keep_pins();
    std::shared_ptr<Snapshot> checkpoint(size_t position) const;
    std::span<const uint32_t> filled_pages() const;
    std::shared_ptr<Snapshot> save(bool own);
    bool save_if_possible();
    void load(const Snapshot& from);
    std::vector<StatePart> all_parts(uint64_t tokens) const;
    template <class Move>
    void move_part(const StatePart& part, uint64_t offset, uint64_t bytes, const Move& move);
    void write_sampling(const Sampling& sampling);
    void give_back();
    void write_step(uint32_t position, uint32_t rows, uint32_t generation, uint32_t last_token);
    void feed(std::span<const int32_t> ids, const Program& program);
    void begin_feed(std::span<const int32_t> ids);
    void end_feed(std::span<const int32_t> ids);
    void start_step();
    void give_up_steps();
    void count_tokens();
    bool penalised() const;
    Tail tail_kind() const;
    void check_logits() const;
    template <class T>
    std::vector<T> read_columns(Slot<T> slot, uint32_t rows, uint32_t made, uint32_t top);

    std::shared_ptr<Engine> engine_;
    std::optional<uint32_t> index_;  // row of the pools; none once closed
    std::vector<uint32_t> pages_;
    std::vector<uint32_t> tokens_;       // all tokens fed
    std::atomic<uint32_t> position_{0};  // their number
    size_t prompt_tokens_ = 0;           // those before the output that penalties count
    uint32_t last_rows_ = 0;             // rows of the newest pass; 0 before any
    uint32_t generation_ = 0;            // of the newest recurrent state
    bool counts_valid_ = false;
    bool placed_ = false;  // the device knows the sampling parameters
    uint32_t ticket_ = 0;
    Sampling sampling_;
    // Snapshots of states that this one has come from, the first ones for as long as it wants to go back to them.
    std::vector<std::shared_ptr<Snapshot>> pins_;
    std::vector<std::weak_ptr<Snapshot>> made_;
    uint32_t loading_ = 0;  // tokens that begin_load() has made room for
    std::shared_ptr<StepQueue> queue_ = std::make_shared<StepQueue>();
};

}  // namespace lily
