// What a session does with its own state: forks, snapshots, going back, and the way into files.
#include <algorithm>
#include <new>
#include <utility>

#include "session.h"

namespace lily {
namespace {

constexpr size_t kLeastKept = 32;  // tokens that are quicker to read again than a snapshot is worth

}  // namespace

std::unique_ptr<Session> Session::fork() {
    std::unique_ptr<Session> child(new Session(engine_, Unplaced()));
    const auto guard = lock();
    child->take_place();
    child->sampling_ = sampling_;
    child->write_sampling(sampling_);
    child->placed_ = true;
    if (tokens_.empty()) return child;
    const std::span<const uint32_t> pages = filled_pages();
    child->pages_.assign(pages.begin(), pages.end());
    engine_->pages_->hold(pages);
    child->write_table(0, pages);
    engine_->copy_state(engine_->state_of(*index_, generation_), engine_->state_of(*child->index_, 0));
    child->pins_ = pins_;
    child->made_ = made_;
    child->tokens_.assign(tokens_.begin(), tokens_.end());
    child->position_ = static_cast<uint32_t>(tokens_.size());
    child->prompt_tokens_ = prompt_tokens_;
    child->last_rows_ = 1;
    return child;
}

// Without those that are there for steps to come.
std::span<const uint32_t> Session::filled_pages() const {
    return std::span<const uint32_t>(pages_).first(pages_of(tokens_.size()));
}

// The snapshot of a position, of a state that the present one has come from.
std::shared_ptr<Snapshot> Session::checkpoint(size_t position) const {
    for (const auto& pin : pins_)
        if (pin->tokens.size() == position) return pin;
    for (const auto& made : made_)
        if (auto snapshot = made.lock(); snapshot && snapshot->tokens.size() == position) return snapshot;
    return nullptr;
}

// The snapshot of the present position, made if need be; nullptr when there is no room. The same tokens can have
// another state, for instance where they were decoded: `own` takes none of those.
std::shared_ptr<Snapshot> Session::save(bool own) {
    SnapshotStore& store = *engine_->snapshots_;
    std::shared_ptr<Snapshot> found = checkpoint(tokens_.size());
    if (!found && !own) found = store.find(tokens_);
    if (found) return found;
    made_.reserve(made_.size() + 1);
    found = store.add(tokens_, prompt_tokens_, filled_pages());
    if (!found) return nullptr;
    try {
        engine_->copy_state(engine_->state_of(*index_, generation_), engine_->state_of(*found));
    } catch (...) {
        store.remove(found);
        throw;
    }
    std::erase_if(made_, [](const auto& made) { return made.expired(); });
    made_.push_back(found);
    return found;
}

// A snapshot more is a luxury: that there is no memory for it is no error.
bool Session::save_if_possible() {
    try {
        return save(false) != nullptr;
    } catch (const std::bad_alloc&) {
        return false;
    } catch (const Error& error) {
        if (error.kind() == ErrorKind::kOutOfMemory) return false;
        throw;
    }
}

bool Session::snapshot(bool pinned) {
    const auto guard = lock();
    if (tokens_.empty()) return true;
    if (!pinned) return save_if_possible();
    const std::shared_ptr<Snapshot> made = save(true);
    if (!made)
        throw Error(ErrorKind::kOutOfMemory, "snapshot_memory has room for " +
                                                 std::to_string(engine_->snapshots_->most()) +
                                                 " snapshots, and none of them can go");
    if (std::find(pins_.begin(), pins_.end(), made) == pins_.end()) pins_.push_back(made);
    return true;
}

std::vector<uint32_t> Session::checkpoints() {
    const auto guard = lock_running();
    std::vector<uint32_t> found{0};
    for (const auto& pin : pins_) found.push_back(static_cast<uint32_t>(pin->tokens.size()));
    for (const auto& made : made_)
        if (const auto snapshot = made.lock()) found.push_back(static_cast<uint32_t>(snapshot->tokens.size()));
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
}

void Session::rewind(uint32_t position) {
    const auto guard = lock();
    if (position == tokens_.size()) return give_up_steps();
    if (position == 0) return forget();
    const std::shared_ptr<Snapshot> found = checkpoint(position);
    if (!found)
        throw Error(ErrorKind::kValue, "position " + std::to_string(position) +
                                           " is not one of the session's checkpoints: snapshot() makes one");
    load(*found);
    keep_pins();
}

// Lets go of snapshots that the session has not come from any more.
void Session::keep_pins() {
    auto left = [&](const std::shared_ptr<Snapshot>& snapshot) {
        const auto& tokens = snapshot->tokens;
        return tokens.size() > tokens_.size() || !std::equal(tokens.begin(), tokens.end(), tokens_.begin());
    };
    std::erase_if(pins_, left);
    std::erase_if(made_, [&](const auto& made) {
        const auto snapshot = made.lock();
        return !snapshot || left(snapshot);
    });
}

// A session that cannot be brought to a snapshot is empty afterwards.
void Session::load(const Snapshot& from) {
    give_up_steps();
    engine_->pages_->hold(from.pages);
    release_pages();
    pages_.assign(from.pages.begin(), from.pages.end());
    try {
        write_table(0, pages_);
        engine_->copy_state(engine_->state_of(from), engine_->state_of(*index_, 0));
        tokens_.assign(from.tokens.begin(), from.tokens.end());
    } catch (...) {
        forget();
        throw;
    }
    position_ = static_cast<uint32_t>(tokens_.size());
    prompt_tokens_ = from.prompt_tokens;
    last_rows_ = 1;
    generation_ = 0;
    counts_valid_ = false;
}

Session::Reuse Session::restart(std::span<const int32_t> given, const CancelFlag* flag) {
    const auto guard = lock(flag);
    const std::vector<int32_t> owned(given.begin(), given.end());  // the caller's may change meanwhile
    const std::span<const int32_t> ids(owned);
    check_ids(ids);
    Reuse reuse{0, 0, -1};
    // Notes how far a sequence goes with the prompt; whether it begins it as a whole.
    auto begins = [&](const std::vector<uint32_t>& tokens) {
        const size_t common = common_prefix(tokens, ids);
        const bool whole = common == tokens.size();
        if (common > reuse.common || (common == reuse.common && !whole && reuse.expected < 0)) {
            reuse.common = static_cast<uint32_t>(common);
            reuse.expected = whole ? -1 : int64_t{tokens[common]};
        }
        return whole;
    };
    const bool goes_on = begins(tokens_);
    std::shared_ptr<Snapshot> best;
    for (const auto& snapshot : engine_->snapshots_->all())
        if (begins(snapshot->tokens) && (!best || snapshot->tokens.size() > best->tokens.size())) best = snapshot;
    if (best) engine_->snapshots_->use(*best);
    if (best && goes_on && best->tokens.size() <= tokens_.size()) best = nullptr;
    if (!goes_on || best) {
        // Held by `best`, what is about to be used is not what makes room.
        if (tokens_.size() >= kLeastKept) save_if_possible();
        if (best)
            load(*best);
        else
            forget();
        keep_pins();
        if (best && !checkpoint(tokens_.size())) made_.push_back(best);
    }
    give_up_steps();
    prompt_tokens_ = tokens_.size();
    counts_valid_ = false;
    reuse.tokens = static_cast<uint32_t>(tokens_.size());
    return reuse;
}

Session::Pages Session::pages() {
    const auto guard = lock_running();
    const uint32_t shared = engine_->pages_->count_shared(pages_);
    return {static_cast<uint32_t>(pages_.size()) - shared, shared};
}

std::vector<uint32_t> Session::tokens() {
    const auto guard = lock_running();
    return tokens_;
}

uint32_t Session::prompt_tokens() {
    const auto guard = lock_running();
    return static_cast<uint32_t>(prompt_tokens_);
}

std::vector<StatePart> Session::parts(uint32_t tokens) {
    const auto guard = lock_running();
    return all_parts(tokens);
}

std::vector<StatePart> Session::all_parts(uint64_t tokens) const {
    std::vector<StatePart> parts = cache_parts(engine_->config(), engine_->model_.state, tokens);
    for (StatePart& part : carried_parts(engine_->config(), engine_->model_.state, *index_, generation_))
        parts.push_back(std::move(part));
    return parts;
}

// move(place in the buffer, place in the piece, bytes), for each stretch that is in one piece on the device.
template <class Move>
void Session::move_part(const StatePart& part, uint64_t offset, uint64_t bytes, const Move& move) {
    if (offset > part.bytes() || bytes > part.bytes() - offset)
        throw Error(ErrorKind::kValue, part.name + ": outside of the part");
    if (part.row_bytes == 0) return move(part.slot.offset + offset, 0, bytes);
    const uint64_t page_bytes = PAGE * part.row_bytes;
    for (uint64_t done = 0; done < bytes;) {
        const uint64_t in_page = (offset + done) % page_bytes, length = std::min(bytes - done, page_bytes - in_page);
        const uint64_t page = pages_.at((offset + done) / page_bytes);
        move(part.slot.offset + page * page_bytes + in_page, done, length);
        done += length;
    }
}

void Session::read_part(uint32_t index, uint64_t offset, std::span<std::byte> to) {
    const auto guard = lock();
    const StatePart part = all_parts(tokens_.size()).at(index);
    move_part(part, offset, to.size(), [&](uint64_t place, uint64_t at, uint64_t bytes) {
        engine_->device_->read(part.slot.buffer, place, to.data() + at, bytes);
    });
}

void Session::begin_load(uint32_t tokens) {
    const auto guard = lock();
    if (tokens == 0 || tokens > engine_->capacity().context)
        throw Error(ErrorKind::kContextFull, std::to_string(tokens) + " tokens do not fit");
    forget();
    take_pages(tokens);
    loading_ = tokens;
}

void Session::write_part(uint32_t index, uint64_t offset, std::span<const std::byte> from) {
    const auto guard = lock_running(nullptr, true);
    const StatePart part = all_parts(loading_).at(index);
    move_part(part, offset, from.size(), [&](uint64_t place, uint64_t at, uint64_t bytes) {
        engine_->device_->write(part.slot.buffer, place, from.data() + at, bytes);
    });
}

void Session::end_load(std::span<const int32_t> given, uint32_t prompt_tokens) {
    const auto guard = lock_running(nullptr, true);
    const std::vector<int32_t> ids(given.begin(), given.end());  // the caller's may change meanwhile
    check_ids(ids);
    if (ids.size() != loading_ || prompt_tokens > ids.size())
        throw Error(ErrorKind::kLogic, "this is not what begin_load() made room for");
    tokens_.assign(ids.begin(), ids.end());
    position_ = static_cast<uint32_t>(tokens_.size());
    prompt_tokens_ = prompt_tokens;
    last_rows_ = 1;
    loading_ = 0;
}

}  // namespace lily
