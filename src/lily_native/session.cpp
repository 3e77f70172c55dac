#include "session.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace lily {
namespace {

constexpr size_t kFullChunkTokens = 32768;  // context up to which a prompt is read in whole chunks

uint32_t previous_generation(uint32_t generation) {
    return (generation + GENERATIONS - 1) % GENERATIONS;
}

// Plans exist for a few numbers of top log probabilities only, so that their number is bounded.
uint32_t recorded_top(uint32_t top) {
    for (uint32_t made : {0u, 1u, 8u, 32u})
        if (top <= made) return made;
    return kMaxTop;
}

Sampling greedy() {
    return {.params = {.temperature = 0,
                       .top_p = 1,
                       .min_p = 0,
                       .presence = 0,
                       .frequency = 0,
                       .repetition = 1,
                       .top_k = 0,
                       .seed_low = 0,
                       .seed_high = 0,
                       .bias_count = 0},
            .bias = {}};
}

}  // namespace

Session::Session(std::shared_ptr<Engine> engine, Unplaced) : engine_(std::move(engine)), sampling_(greedy()) {
    // All that a full context needs, so that no step allocates; the system commits it as it is used.
    tokens_.reserve(engine_->capacity().context);
    pages_.reserve(engine_->capacity().session_pages());
}

Session::Session(std::shared_ptr<Engine> engine) : Session(std::move(engine), Unplaced()) {
    engine_->check_usable();
    take_place();
}

// Does not wait for the device: the first call that has it does what is to be done there.
void Session::take_place() {
    const std::lock_guard pools(engine_->pools_);
    if (engine_->free_sessions_.empty())
        throw Error(ErrorKind::kFull, "all " + std::to_string(engine_->capacity().sessions) +
                                          " sessions are in use; close one or open the engine with a larger "
                                          "max_sessions");
    index_ = engine_->free_sessions_.back();
    engine_->free_sessions_.pop_back();
}

// Nobody else has the session any more, so this need not wait until the engine is idle.
Session::~Session() {
    give_back();
}

void Session::close() {
    // In a forked child the mutex may be held for ever by a thread that does not exist there.
    if (getpid() != engine_->process_) return;
    const Engine::Guard guard(engine_->mutex_);
    give_back();
}

void Session::give_back() {
    if (!index_ || getpid() != engine_->process_) return;
    release_pages();
    pins_.clear();
    const std::lock_guard pools(engine_->pools_);
    engine_->free_sessions_.push_back(*index_);
    index_.reset();
}

Engine::Guard Session::lock_running(const CancelFlag* flag, bool loads) {
    auto guard = engine_->lock(flag);
    if (!index_) throw Error(ErrorKind::kLogic, "the session is closed");
    if ((loading_ != 0) != loads)
        throw Error(ErrorKind::kLogic, loads ? "nothing is being loaded" : "the session is being loaded");
    if (engine_->running_ != queue_) engine_->settle();  // maybe steps of the session that had this place before
    if (!placed_) write_sampling(sampling_);
    placed_ = true;
    return guard;
}

Engine::Guard Session::lock(const CancelFlag* flag) {
    auto guard = lock_running(flag);
    engine_->settle();
    return guard;
}

// Queued steps wrote to later generations only: going back to the newest one that was handed out undoes them.
void Session::give_up_steps() {
    queue_->ready.clear();
    queue_->failure = nullptr;
}

void Session::reset() {
    const auto guard = lock();
    forget();
}

void Session::forget() {
    give_up_steps();
    release_pages();
    pins_.clear();
    made_.clear();
    loading_ = 0;
    tokens_.clear();
    position_ = 0;
    prompt_tokens_ = 0;
    last_rows_ = 0;
    generation_ = 0;
    counts_valid_ = false;
}

void Session::check_ids(std::span<const int32_t> ids) const {
    if (ids.empty()) throw Error(ErrorKind::kValue, "no token ids");
    const uint32_t vocab = engine_->config().vocab;
    for (int32_t id : ids)
        if (id < 0 || static_cast<uint32_t>(id) >= vocab)
            throw Error(ErrorKind::kValue,
                        "token id " + std::to_string(id) + " is outside the vocabulary of " + std::to_string(vocab));
}

void Session::check_room(size_t tokens) const {
    const size_t context = engine_->capacity().context;
    if (tokens > context - tokens_.size())
        throw Error(ErrorKind::kContextFull, std::to_string(tokens) +
                                                 " more tokens do not fit: " + std::to_string(tokens_.size()) +
                                                 " of the context's " + std::to_string(context) + " are used");
}

// Chunks end at absolute multiples of 64, so that a token is always computed in the same tile form. Behind a long
// context they become shorter: the work of one attention launch grows with both, and a GPU that is busy with one launch
// for seconds is taken away from the process.
uint32_t Session::chunk_of(size_t tokens) const {
    size_t chunk = engine_->capacity().chunk;
    if (tokens_.size() > kFullChunkTokens)
        chunk = std::max<size_t>(chunk * kFullChunkTokens / tokens_.size() / TILE_K * TILE_K, TILE_K);
    if (tokens <= chunk) return static_cast<uint32_t>(tokens);
    const size_t end = (tokens_.size() + chunk) / TILE_K * TILE_K;
    return static_cast<uint32_t>(end - tokens_.size());
}

// Has pages of the session's own where the next tokens go.
void Session::take_pages(uint32_t tokens) {
    const size_t wanted = pages_of(tokens_.size() + tokens);
    try {
        for (size_t i = tokens_.size() / PAGE; i < wanted; ++i)
            if (i == pages_.size() || engine_->pages_->shared(pages_[i])) take_page(i);
    } catch (...) {
        drop_spare_pages();
        throw;
    }
}

// Pages that nothing is in are for others.
void Session::drop_spare_pages() {
    const size_t used = pages_of(tokens_.size() + queue_->size());
    if (pages_.size() <= used) return;
    engine_->pages_->drop(std::span<const uint32_t>(pages_).subspan(used));
    pages_.resize(used);
}

// A page at the end, or instead of one that others hold too.
void Session::take_page(size_t place) {
    const bool added = place == pages_.size();
    std::optional<uint32_t> taken;
    while (!(taken = engine_->pages_->take())) {
        engine_->make_room();
        if (!added && !engine_->pages_->shared(pages_[place])) return;  // it was a snapshot that had it too
    }
    const uint32_t page = *taken;
    try {
        if (!added) engine_->copy_page(pages_[place], page);
        write_table(place, {&page, 1});
    } catch (...) {
        engine_->pages_->drop({&page, 1});
        throw;
    }
    if (added) return pages_.push_back(page);
    engine_->pages_->drop({&pages_[place], 1});
    pages_[place] = page;
}

// Entries of the session's row, from `first` on.
void Session::write_table(size_t first, std::span<const uint32_t> pages) {
    const uint64_t row = uint64_t{*index_} * engine_->capacity().session_pages();
    engine_->write<uint32_t>(engine_->model_.state.page_table.slice(row + first, pages.size()), pages);
}

void Session::release_pages() {
    engine_->pages_->drop(pages_);
    pages_.clear();
}

void Session::write_step(uint32_t position, uint32_t rows, uint32_t generation, uint32_t last_token) {
    const StepState step{.session = *index_,
                         .position = position,
                         .rows = rows,
                         .generation = generation,
                         .last_token = last_token,
                         .ticket = ticket_};
    engine_->write<StepState>(engine_->model_.state.step, {&step, 1});
}

void Session::feed(std::span<const int32_t> ids, const Program& program) {
    begin_feed(ids);
    engine_->device_->run(program);
    end_feed(ids);
}

// Puts the step's tokens and place where the device looks for them.
void Session::begin_feed(std::span<const int32_t> ids) {
    const auto rows = static_cast<uint32_t>(ids.size());
    give_up_steps();
    take_pages(rows);
    write_step(static_cast<uint32_t>(tokens_.size()), rows, generation_, NO_TOKEN);
    engine_->write<uint32_t>(engine_->model_.state.tokens, std::vector<uint32_t>(ids.begin(), ids.end()));
}

void Session::end_feed(std::span<const int32_t> ids) {
    tokens_.insert(tokens_.end(), ids.begin(), ids.end());
    position_ = static_cast<uint32_t>(tokens_.size());
    prompt_tokens_ = tokens_.size();
    last_rows_ = static_cast<uint32_t>(ids.size());
    generation_ = (generation_ + 1) % GENERATIONS;
    counts_valid_ = false;
}

uint32_t Session::prefill(std::span<const int32_t> given, const CancelFlag* flag) {
    const auto guard = lock(flag);
    check_room(given.size());
    const uint32_t taken = chunk_of(given.size());
    const std::vector<int32_t> owned(given.begin(), given.begin() + taken);  // the caller's may change meanwhile
    const std::span<const int32_t> ids(owned);
    check_ids(ids);
    // The rows past the last multiple of 64 always go alone, whatever came before them in the same chunk.
    const size_t end = tokens_.size() + taken, whole = std::max(end / TILE_K * TILE_K, tokens_.size());
    const size_t first = whole - tokens_.size();
    if (first > 0) feed(ids.first(first), engine_->body(engine_->prefill_pass(static_cast<uint32_t>(first))));
    if (taken == first) return taken;
    try {
        feed(ids.subspan(first), engine_->body(engine_->prefill_pass(static_cast<uint32_t>(taken - first))));
    } catch (const std::exception&) {
        if (first == 0) throw;
        return static_cast<uint32_t>(first);  // these are in; the next call meets the error with nothing done
    }
    return taken;
}

void Session::prefill_by(std::span<const int32_t> given, const PassRunner& run) {
    const auto guard = lock();
    check_room(given.size());
    if (given.size() > engine_->capacity().chunk) throw Error(ErrorKind::kValue, "more tokens than prefill_chunk");
    const std::vector<int32_t> ids(given.begin(), given.end());  // the caller's may change meanwhile
    check_ids(ids);
    begin_feed(ids);
    run(*engine_->device_, engine_->model_, engine_->prefill_pass(static_cast<uint32_t>(ids.size())));
    end_feed(ids);
}

Scores Session::score(std::span<const int32_t> given, std::span<const int32_t> targets, uint32_t top) {
    const auto guard = lock();
    check_room(given.size());
    if (targets.size() != given.size()) throw Error(ErrorKind::kValue, "as many targets as ids are needed");
    if (top > std::min(kMaxTop, engine_->config().vocab))
        throw Error(ErrorKind::kValue, "at most " + std::to_string(kMaxTop) + " top log probabilities");
    const State& s = engine_->model_.state;
    Scores scores;
    scores.taken = chunk_of(given.size());
    // Copies: the caller's arrays may change meanwhile.
    const std::vector<int32_t> ids(given.begin(), given.begin() + scores.taken);
    const std::vector<int32_t> expected(targets.begin(), targets.begin() + scores.taken);
    check_ids(ids);
    check_ids(expected);
    engine_->write<uint32_t>(s.targets, std::vector<uint32_t>(expected.begin(), expected.end()));
    const uint32_t made = recorded_top(top);
    feed(ids, engine_->score(scores.taken, made));
    scores.logprobs.resize(scores.taken);
    engine_->read<float>(s.logprobs, scores.logprobs);
    scores.top_ids = read_columns(s.top_ids, scores.taken, made, top);
    scores.top_logprobs = read_columns(s.top_logprobs, scores.taken, made, top);
    return scores;
}

// Row-major [rows, made] on the device; the first `top` columns of it.
template <class T>
std::vector<T> Session::read_columns(Slot<T> slot, uint32_t rows, uint32_t made, uint32_t top) {
    std::vector<T> all(uint64_t{rows} * made), cut;
    engine_->read<T>(slot, all);
    cut.reserve(uint64_t{rows} * top);
    for (uint32_t r = 0; r < rows; ++r) cut.insert(cut.end(), all.begin() + r * made, all.begin() + r * made + top);
    return cut;
}

bool Session::penalised() const {
    const SampleParams& p = sampling_.params;
    return p.presence != 0 || p.frequency != 0 || p.repetition != 1;
}

Tail Session::tail_kind() const {
    if (sampling_.params.temperature > 0) return Tail::kSampled;
    return penalised() || !sampling_.bias.empty() ? Tail::kAdjustedGreedy : Tail::kGreedy;
}

void Session::set_sampling(const Sampling& sampling) {
    const auto guard = lock();
    if (sampling.bias.size() > MAX_BIAS)
        throw Error(ErrorKind::kValue, "at most " + std::to_string(MAX_BIAS) + " logit biases");
    Sampling copy = sampling;  // before anything changes: there may be no memory for it
    copy.params.bias_count = static_cast<uint32_t>(copy.bias.size());
    write_sampling(copy);
    give_up_steps();
    sampling_ = std::move(copy);
    counts_valid_ = false;
}

void Session::write_sampling(const Sampling& sampling) {
    const State& s = engine_->model_.state;
    std::vector<uint32_t> ids;
    std::vector<float> values;
    for (const auto& [id, value] : sampling.bias) {
        ids.push_back(id);
        values.push_back(value);
    }
    engine_->write<SampleParams>(s.params.slice(*index_, 1), {&sampling.params, 1});
    engine_->write<uint32_t>(s.bias_ids.slice(uint64_t{*index_} * MAX_BIAS, MAX_BIAS), ids);
    engine_->write<float>(s.bias_values.slice(uint64_t{*index_} * MAX_BIAS, MAX_BIAS), values);
}

// Writes the penalty counts of all tokens so far into the generation before the newest, where the tail reads them.
void Session::count_tokens() {
    const uint64_t vocab = engine_->config().vocab;
    std::vector<ushort> counts(vocab);
    for (size_t i = 0; i < tokens_.size(); ++i) {
        ushort& count = counts[tokens_[i]];
        if (i < prompt_tokens_)
            count |= SEEN_IN_PROMPT;
        else if ((count & COUNT_MASK) != COUNT_MASK)
            ++count;
    }
    const uint64_t row = uint64_t{*index_} * GENERATIONS + previous_generation(generation_);
    engine_->write<ushort>(engine_->model_.state.counts.slice(row * vocab, vocab), counts);
}

// Starts the step after those that are queued.
void Session::start_step() {
    const auto queued = static_cast<uint32_t>(queue_->size());
    const auto position = static_cast<uint32_t>(tokens_.size()) + queued;
    take_pages(queued + 1);
    const Program& tail = engine_->tail(tail_kind());
    const Program& body = engine_->body(decode_pass(engine_->capacity(), position));
    // Behind a queued step, the device itself has moved the state on.
    if (queued == 0) {
        uint32_t uncounted = tokens_.back();
        if (penalised() && !counts_valid_) {
            count_tokens();
            uncounted = NO_TOKEN;
        }
        write_step(position - last_rows_, last_rows_, previous_generation(generation_), uncounted);
    }
    engine_->start_step(queue_, tail, body, (ticket_ + queued) % TOKEN_RING);
}

Picked Session::step(uint32_t ahead, const CancelFlag* flag) {
    const auto guard = lock_running(flag);
    check_logits();
    check_room(1);
    if (queue_->failure) std::rethrow_exception(std::exchange(queue_->failure, nullptr));
    if (queue_->size() == 0) start_step();
    // Steps that were made ready when another call came between are handed out before new ones are started.
    const size_t room = engine_->capacity().context - tokens_.size() - 1;
    const size_t most = std::min<size_t>({room, ahead, engine_->device_->queue_depth() - 1, kMostSteps - 1}) + 1;
    while (queue_->ready.empty() && queue_->size() < most) {
        try {
            start_step();
        } catch (const Error& error) {
            if (queue_->size() == 0 || error.kind() != ErrorKind::kOutOfMemory) throw;
            break;  // there is no room ahead, which is met when it is that step's turn
        }
    }
    const Picked picked = engine_->finish_step(*queue_);
    ++ticket_;
    tokens_.push_back(picked.token);
    position_ = static_cast<uint32_t>(tokens_.size());
    last_rows_ = 1;
    generation_ = (generation_ + 1) % GENERATIONS;
    counts_valid_ = penalised();
    return picked;
}

void Session::check_logits() const {
    if (last_rows_ == 0) throw Error(ErrorKind::kLogic, "there are no logits yet: prefill a prompt first");
}

// What the host knows already: this waits for no step in flight.
uint32_t Session::last_token() {
    const auto guard = engine_->lock();
    if (!index_) throw Error(ErrorKind::kLogic, "the session is closed");
    if (tokens_.empty()) throw Error(ErrorKind::kLogic, "the session has no token yet");
    return tokens_.back();
}

std::vector<float> Session::logits() {
    const auto guard = lock();
    check_logits();
    const uint64_t vocab = engine_->config().vocab, row = uint64_t{*index_} * GENERATIONS + generation_;
    std::vector<float> values(vocab);
    engine_->read<float>(engine_->model_.state.logits.slice(row * vocab, vocab), values);
    return values;
}

std::vector<Picked> Session::top(uint32_t k) {
    const auto guard = lock();
    if (k > std::min(kMaxTop, engine_->config().vocab))
        throw Error(ErrorKind::kValue, "at most " + std::to_string(kMaxTop) + " top log probabilities");
    check_logits();
    const uint32_t made = recorded_top(k);
    write_step(0, 1, previous_generation(generation_), NO_TOKEN);
    engine_->device_->run(engine_->top(made));
    std::vector<uint32_t> ids(k);
    std::vector<float> logprobs(k);
    engine_->read<uint32_t>(engine_->model_.state.top_ids, ids);
    engine_->read<float>(engine_->model_.state.top_logprobs, logprobs);
    std::vector<Picked> picked;
    for (uint32_t i = 0; i < k; ++i) picked.push_back({ids[i], logprobs[i]});
    return picked;
}

}  // namespace lily
