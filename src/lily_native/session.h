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

    // Feeds a bounded chunk of ids and returns how many; the logits are then those of the last one.
    uint32_t prefill(std::span<const int32_t> ids);
    // As prefill, with log probabilities: targets[i] is the token expected after ids[i].
    Scores score(std::span<const int32_t> ids, std::span<const int32_t> targets, uint32_t top);

    // As prefill, in one pass of at most a chunk, which `run` carries out: for those who look into a pass.
    using PassRunner = std::function<void(Device&, const Model&, const Pass&)>;
    void prefill_by(std::span<const int32_t> ids, const PassRunner& run);

    void set_sampling(const Sampling& sampling);
    // Picks a token from the logits and feeds it. The device may go on with as many as `ahead` further ones while the
    // caller looks at this one; they are given up if the caller does something else.
    Picked step(uint32_t ahead);

    // The newest token fed; kLogic before any.
    uint32_t last_token();

    std::vector<float> logits();
    // The k most likely next tokens, most likely first.
    std::vector<Picked> top(uint32_t k);

private:
    // The engine's lock. lock() ends every queue of steps, lock_running() all but the session's own.
    std::unique_lock<std::mutex> lock();
    std::unique_lock<std::mutex> lock_running();
    void check_ids(std::span<const int32_t> ids) const;
    void check_room(size_t tokens) const;
    uint32_t chunk_of(size_t tokens) const;
    void take_pages(uint32_t tokens);
    void release_pages();
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
    uint32_t ticket_ = 0;
    Sampling sampling_;
    std::shared_ptr<StepQueue> queue_ = std::make_shared<StepQueue>();
};

}  // namespace lily
