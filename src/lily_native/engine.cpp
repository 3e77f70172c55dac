#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <unordered_map>

#include "nan_device.h"
#include "shader_source.h"
#include "submissions.h"
#include "thread_pool.h"
#include "weight_reader.h"

namespace lily {
namespace {

constexpr uint64_t kMostSnapshots = 4096;  // every prompt looks through all of them

constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

// Rows of the recorded prefill passes below a whole chunk.
constexpr uint32_t kPrefillRows[] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};

// Before a device exists: what the largest of its kind take.
uint32_t usual_prefill_rows(const std::string& device) {
    return device == "cpu32" ? kWidePrefillChunk : cuda_index(device) ? kLargePrefillChunk : kPrefillChunk;
}

// Rows of a chunk: as asked for, or what suits the device, but no more than a context has.
uint32_t chunk_of(const EngineOptions& options, uint32_t device_rows) {
    const uint32_t wanted = options.chunk != 0 ? options.chunk : device_rows;
    return std::min(wanted, (options.context + TILE_K - 1) / TILE_K * TILE_K);
}

Capacity capacity_of(const EngineOptions& options, uint32_t device_rows, TileChoice tiles,
                     const AttentionSplit& split) {
    if (options.tile != 0) tiles.rows = {&options.tile, 1};
    return {.context = options.context,
            .chunk = chunk_of(options, device_rows),
            .sessions = options.sessions,
            .pages = static_cast<uint32_t>(pages_of(options.context)) * options.sessions,
            .tiles = {tiles.rows.begin(), tiles.rows.end()},
            .floors = tiles.floors,
            .split = split};
}

// Before a device exists, plans of memory take a GPU's tiles, the lowest, and are upper bounds.
Capacity capacity_before(const EngineOptions& options) {
    return capacity_of(options, usual_prefill_rows(choose_device(options)), {.rows = kGpuTileRows}, {});
}

uint64_t sum(const std::vector<uint64_t>& sizes) {
    uint64_t total = 0;
    for (uint64_t size : sizes) total += size;
    return total;
}

struct Sizes {
    std::vector<uint64_t> weights, kv, recurrent, logits, scratch, shared;
};

Sizes measure(const Config& config, const Capacity& capacity, uint64_t limit) {
    Carver weights(limit), kv(limit), recurrent(limit), logits(limit), scratch(limit), shared(limit);
    std::vector<TensorTarget> targets;
    layout_weights(config, weights, targets);
    layout_state(config, capacity, {kv, recurrent, logits, scratch, shared});
    return {weights.sizes(), kv.sizes(), recurrent.sizes(), logits.sizes(), scratch.sizes(), shared.sizes()};
}

uint64_t page_bytes(const Config& config) {
    uint64_t caches = 0;
    for (uint32_t i = 0; i < config.layers; ++i) caches += config.is_attention(i) ? 2 : 0;
    return caches * PAGE * config.cache_row() * sizeof(bfloat);
}

// Of the memory of one snapshot.
uint64_t carried_bytes(const Config& config) {
    uint64_t floats = config.vocab;
    for (uint32_t i = 0; i < config.layers; ++i)
        if (!config.is_attention(i)) floats += config.conv_state() + config.delta_state();
    return floats * sizeof(float);
}

// With a page that is copied when a session goes on from where it was made.
uint64_t snapshot_bytes(const Config& config) {
    return carried_bytes(config) + page_bytes(config);
}

uint32_t snapshots_in(const Config& config, uint64_t bytes) {
    return static_cast<uint32_t>(std::min<uint64_t>(bytes / snapshot_bytes(config), kMostSnapshots));
}

// The pages of snapshots come on top, those of sessions go until everything fits, down to one session's.
void fit_pages(Capacity& capacity, const Config& config, const MemoryPlan& plan, uint64_t limit) {
    const uint64_t fixed = plan.total() - plan.kv, bytes = std::max<uint64_t>(page_bytes(config), 1);
    const uint64_t room = limit > fixed ? (limit - fixed) / bytes : 0;
    const uint64_t pages = std::min<uint64_t>(capacity.pages, std::max<uint64_t>(room, capacity.session_pages()));
    capacity.pages = static_cast<uint32_t>(pages) + snapshots_in(config, plan.snapshots);
}

MemoryPlan memory_of(const Config& config, const Capacity& capacity, const EngineOptions& options) {
    const Sizes sizes = measure(config, capacity, kNoLimit);
    return {.weights = sum(sizes.weights),
            .kv = capacity.session_pages() * page_bytes(config),
            .state = sum(sizes.recurrent),
            .logits = sum(sizes.logits),
            .scratch = sum(sizes.scratch) + sum(sizes.shared),
            .snapshots = options.snapshot_bytes.value_or(kSnapshotCount * snapshot_bytes(config))};
}

// "auto" takes the processor where the GPU that this build prefers cannot be used.
std::unique_ptr<Device> open_real_device(const EngineOptions& options) {
    const std::string device = choose_device(options);
    if (const std::optional<uint32_t> index = cuda_index(device)) return make_cuda_device(*index);
#if LILY_METAL
    try {
        if (device == "metal") return make_metal_device();
    } catch (const Error& error) {
        if (options.device != "auto" || error.kind() != ErrorKind::kUnsupported) throw;
    }
#endif
    return make_cpu_device(device == "cpu32" ? 32 : 1, options.threads, nullptr, options.shuffle);
}

std::unique_ptr<Device> open_device(const EngineOptions& options) {
    std::unique_ptr<Device> device = open_real_device(options);
    return debug_wants("nan") ? make_nan_device(std::move(device)) : std::move(device);
}

// Sizes for people, in units of 2^30 bytes.
std::string gib(uint64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.2f GiB", static_cast<double>(bytes) / (1u << 30));
    return text;
}

// What fills one target; throws kCheckpoint when the header promised something else.
void add_job(std::vector<ReadJob>& jobs, const TensorTarget& target, const TensorSource& source, uint32_t file) {
    const bool widen = source.dtype == "BF16" && target.dtypes.front() == "F32";
    const uint64_t expected = widen ? target.target.bytes / 2 : target.target.bytes;
    if (source.bytes != expected)
        throw Error(ErrorKind::kCheckpoint, source.name + ": found " + std::to_string(source.bytes) +
                                                " bytes, expected " + std::to_string(expected));
    const auto check = !target.must_be_finite   ? ReadJob::Check::kNone
                       : source.dtype == "BF16" ? ReadJob::Check::kFiniteBf16
                                                : ReadJob::Check::kFiniteF32;
    jobs.push_back({.file = file,
                    .offset = source.offset,
                    .bytes = expected,
                    .row_bytes = expected / target.pieces,
                    .buffer = target.target.buffer,
                    .at = target.target.offset,
                    .stride = target.pieces > 1 ? target.stride : target.target.bytes,
                    .check = check,
                    .tensor = target.name.c_str(),
                    .bf16_to_f32 = widen});
}

}  // namespace

// Far beyond any use, and small enough that no product of them wraps.
constexpr uint32_t kMostContext = 1u << 24, kMostChunk = 1u << 16, kMostSessions = 1u << 12, kMostThreads = 1u << 10;

void check_range(const char* name, uint32_t value, uint32_t least, uint32_t most) {
    if (value < least || value > most)
        throw Error(ErrorKind::kValue, std::string(name) + " must be " + std::to_string(least) + " to " +
                                           std::to_string(most) + ", found " + std::to_string(value));
}

std::string choose_device(const EngineOptions& options) {
    check_range("context", options.context, 1, kMostContext);
    if (options.chunk != 0) check_range("prefill_chunk", options.chunk, TILE_K, kMostChunk);
    check_range("max_sessions", options.sessions, 1, kMostSessions);
    check_range("threads", options.threads, 0, kMostThreads);
    if (options.chunk % TILE_K != 0)
        throw Error(ErrorKind::kValue,
                    "prefill_chunk must be a multiple of 64, found " + std::to_string(options.chunk));
    if (options.device == "cpu" || options.device == "cpu32" || cuda_index(options.device)) return options.device;
#if LILY_METAL
    if (options.device == "auto" || options.device == "metal") return "metal";
#endif
    if (options.device == "auto") return "cpu";
    if (options.device == "metal")
        throw Error(ErrorKind::kUnsupported, "device 'metal' is not in this build, which has cuda, cpu and cpu32");
    throw Error(ErrorKind::kValue,
                "unknown device '" + options.device + "': expected auto, metal, cuda, cuda:NUMBER, cpu or cpu32");
}

MemoryPlan plan_memory(const Config& config, const EngineOptions& options) {
    check_config(config);
    return memory_of(config, capacity_before(options), options);
}

Pass decode_pass(const Capacity& capacity, uint32_t position) {
    const AttentionSplit& split = capacity.split;
    if (position < split.whole) return {.decode = true, .rows = 1, .blocks = 1, .block = split.block};
    uint32_t tokens = 4 * split.block;
    while (tokens <= position) tokens *= 2;
    const uint32_t block = std::max(split.block, tokens / split.most);
    return {
        .decode = true, .rows = 1, .blocks = (std::min(tokens, capacity.context) + block - 1) / block, .block = block};
}

// A model whose plans can be recorded and not run. Its tiles are those of a GPU.
static Model model_without_memory(const Config& config, const EngineOptions& options) {
    check_config(config);
    const Capacity capacity = capacity_before(options);
    // Any numbers will do for buffers that nobody allocates, as long as they differ.
    Carver weights(kNoLimit, {{0}}), kv(kNoLimit, {{1}}), recurrent(kNoLimit, {{2}}), logits(kNoLimit, {{3}});
    Carver scratch(kNoLimit, {{4}}), shared(kNoLimit, {{5}});
    std::vector<TensorTarget> targets;
    Model model{.config = config, .capacity = capacity, .weights = {}, .state = {}};
    model.weights = layout_weights(config, weights, targets);
    model.state = layout_state(config, model.capacity, {kv, recurrent, logits, scratch, shared});
    return model;
}

// Plans that launch every variant any session will need, whatever their number of rows.
static std::vector<Plan> typical_plans(const Model& model) {
    const uint32_t chunk = model.capacity.chunk;
    std::vector<Plan> plans;
    const Pass first = decode_pass(model.capacity, 0), last = decode_pass(model.capacity, model.capacity.context - 1);
    plans.push_back(record_body(model, first));
    if (last.blocks > 1) plans.push_back(record_body(model, last));
    if (model.capacity.tiles.size() > 1)  // else the rows make no difference
        for (uint32_t rows : kPrefillRows)
            if (rows < chunk) plans.push_back(record_body(model, {.decode = false, .rows = rows, .blocks = 1}));
    plans.push_back(record_body(model, {.decode = false, .rows = chunk, .blocks = 1}));
    for (const Tail kind : {Tail::kGreedy, Tail::kAdjustedGreedy, Tail::kSampled})
        plans.push_back(record_tail(model, kind));
    plans.push_back(record_score(model, {.decode = false, .rows = chunk, .blocks = 1}, 1));
    plans.push_back(record_top(model, 1));
    return plans;
}

std::map<std::string, std::string> metal_sources(const Config& config, const EngineOptions& options, bool tensor_ops) {
    const std::vector<Variant> variants = variants_of(typical_plans(model_without_memory(config, options)));
    std::map<std::string, std::string> sources;
    for (size_t i = 0; i < kShaderFamilyCount; ++i)
        sources[kShaderFamilies[i].name] = metal_source(kShaderFamilies[i], variants, tensor_ops);
    return sources;
}

Plan named_plan(const Config& config, const EngineOptions& options, const std::string& name) {
    const Model model = model_without_memory(config, options);
    if (name == "decode") return record_body(model, decode_pass(model.capacity, options.context - 1));
    if (name == "prefill") return record_body(model, {.decode = false, .rows = model.capacity.chunk, .blocks = 1});
    if (name == "greedy") return record_tail(model, Tail::kGreedy);
    if (name == "sampled") return record_tail(model, Tail::kSampled);
    throw Error(ErrorKind::kValue, "no plan is called " + name);
}

Engine::Engine(const Config& config, const std::vector<TensorSource>& tensors, const EngineOptions& options,
               const Progress& progress)
    : process_(getpid()) {
    check_config(config);
    device_ = open_device(options);
    device_name_ = device_->name();
    model_.config = config;
    model_.capacity = capacity_of(options, device_->prefill_rows(), device_->tiles(), device_->attention_split());
    if (model_.capacity.chunk > device_->most_rows())
        throw Error(ErrorKind::kValue, "prefill_chunk must be at most " + std::to_string(device_->most_rows()) +
                                           " on " + device_name_ + ", found " + std::to_string(model_.capacity.chunk));
    const std::vector<TensorTarget> targets = allocate(options);
    compile();
    load(targets, tensors, options.threads, progress);
    device_info_ = device_->info();
    for (uint32_t i = options.sessions; i-- > 0;) free_sessions_.push_back(i);
    pages_.emplace(model_.capacity.pages);
    snapshots_.emplace(*device_, *pages_, carried_bytes(model_.config), snapshots_in(model_.config, memory_.snapshots));
}

std::vector<TensorTarget> Engine::allocate(const EngineOptions& options) {
    const uint64_t limit = device_->max_buffer_bytes();
    memory_ = memory_of(model_.config, model_.capacity, options);
    fit_pages(model_.capacity, model_.config, memory_, std::min(options.memory_limit, device_->memory_limit()));
    if (memory_.total() > device_->memory_limit())
        throw Error(ErrorKind::kOutOfMemory, device_name_ + ": " + gib(memory_.total()) +
                                                 " are needed for weights and state, and this device works on " +
                                                 gib(device_->memory_limit()) +
                                                 "; lower context, max_sessions, prefill_chunk or snapshot_memory");
    const Sizes sizes = measure(model_.config, model_.capacity, limit);
    auto buffers = [&](const char* name, const std::vector<uint64_t>& bytes, bool shared = false) {
        std::vector<BufferId> ids;
        for (uint64_t size : bytes) ids.push_back(device_->allocate(name, size, shared));
        return ids;
    };
    Carver weights(limit, buffers("weights", sizes.weights)), kv(limit, buffers("kv", sizes.kv));
    Carver recurrent(limit, buffers("state", sizes.recurrent)), logits(limit, buffers("logits", sizes.logits));
    Carver scratch(limit, buffers("scratch", sizes.scratch)), shared(limit, buffers("shared", sizes.shared, true));
    std::vector<TensorTarget> targets;
    model_.weights = layout_weights(model_.config, weights, targets);
    model_.state = layout_state(model_.config, model_.capacity, {kv, recurrent, logits, scratch, shared});
    return targets;
}

void Engine::compile() {
    device_->compile(variants_of(typical_plans(model_)));
}

void Engine::load(const std::vector<TensorTarget>& targets, const std::vector<TensorSource>& tensors, uint32_t threads,
                  const Progress& progress) {
    std::unordered_map<std::string, const TensorSource*> by_name;
    for (const TensorSource& source : tensors) by_name[source.name] = &source;
    std::vector<std::string> files;
    std::unordered_map<std::string, uint32_t> file_index;
    std::vector<ReadJob> jobs;
    for (const TensorTarget& target : targets) {
        const auto found = by_name.find(target.name);
        if (found == by_name.end()) throw Error(ErrorKind::kCheckpoint, "missing tensor " + target.name);
        const auto [file, added] = file_index.try_emplace(found->second->path, static_cast<uint32_t>(files.size()));
        if (added) files.push_back(found->second->path);
        add_job(jobs, target, *found->second, file->second);
    }
    const std::unique_ptr<Upload> upload = device_->upload();
    read_weights(files, std::move(jobs), threads != 0 ? threads : usable_cores(), *upload, progress);
    upload->finish();
    float frequencies[ROTARY_DIM / 2];
    for (uint32_t i = 0; i < ROTARY_DIM / 2; ++i)
        frequencies[i] = static_cast<float>(std::pow(double{model_.config.rope_theta}, -2.0 * i / ROTARY_DIM));
    write<float>(model_.weights.inv_freq, frequencies);
}

Engine::~Engine() {
    try {
        close();
    } catch (const std::exception&) {
        // A mutex that cannot be taken: nobody is left to tell.
    }
}

void Engine::close() {
    // A forked child has no worker threads to join, and the mutex may be held by one for ever.
    if (getpid() != process_) {
        for (auto& entry : programs_) static_cast<void>(entry.second.release());
        static_cast<void>(device_.release());
        return;
    }
    const std::lock_guard guard(mutex_);
    running_.reset();
    closed_ = true;
    if (snapshots_) snapshots_->abandon();
    device_.reset();  // waits for what is in flight, and frees its memory
    programs_.clear();
}

void Engine::check_usable() const {
    if (getpid() != process_)
        throw Error(ErrorKind::kLogic, "this engine belongs to the parent process; open a new one after fork()");
    if (closed_) throw Error(ErrorKind::kLogic, "the engine is closed");
}

Engine::Guard Engine::lock(const CancelFlag* flag) {
    check_usable();
    mutex_.lock([&] {
        if (flag != nullptr && flag->over()) throw Error(ErrorKind::kCancelled, "the call is over");
        if (interrupt_) interrupt_();
    });
    Guard guard(mutex_, std::adopt_lock);
    check_usable();
    return guard;
}

template <class Record>
const Program& Engine::prepared(const PlanKey& key, const Record& record) {
    const auto found = programs_.find(key);
    if (found != programs_.end()) return *found->second;
    return *programs_.emplace(key, device_->prepare(record())).first->second;
}

const Program& Engine::body(const Pass& pass) {
    const PlanKey key =
        pass.decode ? PlanKey{Recorded::kDecode, pass.blocks, pass.block} : PlanKey{Recorded::kPrefill, pass.rows, 0};
    return prepared(key, [&] { return record_body(model_, pass); });
}

const Program& Engine::score(uint32_t rows, uint32_t top) {
    const Pass pass = prefill_pass(rows);
    return prepared({Recorded::kScore, pass.rows, top}, [&] { return record_score(model_, pass, top); });
}

const Program& Engine::tail(Tail kind) {
    return prepared({Recorded::kTail, static_cast<uint32_t>(kind), 0}, [&] { return record_tail(model_, kind); });
}

const Program& Engine::top(uint32_t count) {
    return prepared({Recorded::kTop, count, 0}, [&] { return record_top(model_, count); });
}

void Engine::start_step(const std::shared_ptr<StepQueue>& queue, const Program& tail, const Program& body,
                        uint32_t place) {
    const Program* const programs[] = {&tail, &body};
    queue->flying.push_back({0, place});  // before the device has it, so that nothing can fail between
    try {
        queue->flying.back().ticket = device_->submit(programs);
    } catch (...) {
        queue->flying.pop_back();
        settle();  // a part of it may have begun: the next step says anew where it starts
        throw;
    }
    running_ = queue;
}

Picked Engine::finish_step(StepQueue& queue) {
    if (queue.ready.empty()) {
        const StepQueue::Flying first = queue.flying.front();
        try {
            device_->wait(first.ticket);
        } catch (...) {
            queue.flying.clear();
            running_.reset();
            throw;
        }
        queue.flying.pop_front();
        if (queue.flying.empty()) running_.reset();
        return read_ring(first.place);
    }
    const Picked picked = queue.ready.front();
    queue.ready.pop_front();
    return picked;
}

void Engine::settle() {
    if (!running_) return;
    const std::shared_ptr<StepQueue> queue = std::exchange(running_, nullptr);
    try {
        device_->wait(queue->flying.back().ticket);
        for (; !queue->flying.empty(); queue->flying.pop_front())
            queue->ready.push_back(read_ring(queue->flying.front().place));
    } catch (...) {
        queue->failure = std::current_exception();  // for the session that they belong to
    }
    queue->flying.clear();
}

Picked Engine::read_ring(uint32_t place) {
    uint32_t entry[2];
    read<uint32_t>(model_.state.ring.slice(uint64_t{place} * 2, 2), entry);
    return {entry[0], std::bit_cast<float>(entry[1])};
}

Pass Engine::prefill_pass(uint32_t rows) const {
    for (uint32_t bucket : kPrefillRows)
        if (rows <= bucket && bucket < model_.capacity.chunk) return {.decode = false, .rows = bucket, .blocks = 1};
    return {.decode = false, .rows = model_.capacity.chunk, .blocks = 1};
}

uint64_t Engine::most_memory() const {
    const uint64_t pages = model_.capacity.pages - snapshots_in(model_.config, memory_.snapshots);
    return memory_.total() - memory_.kv + pages * page_bytes(model_.config);
}

Engine::Cached Engine::cached() const {
    return {snapshots_->count(), snapshots_->bytes(), model_.capacity.pages - pages_->free(),
            page_bytes(model_.config)};
}

size_t Engine::free_sessions() {
    const std::lock_guard pools(pools_);
    return free_sessions_.size();
}

void Engine::make_room() {
    if (snapshots_->evict()) return;
    throw Error(ErrorKind::kOutOfMemory, "all " + std::to_string(model_.capacity.pages) +
                                             " pages of the cache are in use: close sessions, or open the engine with "
                                             "a larger memory_limit or max_sessions");
}

void Engine::copy_page(uint32_t from, uint32_t to) {
    for (const StatePart& part : cache_parts(model_.config, model_.state, 0)) {
        const uint64_t bytes = PAGE * part.row_bytes;
        device_->copy(part.slot.buffer, part.slot.offset + from * bytes, part.slot.buffer,
                      part.slot.offset + to * bytes, bytes);
    }
}

std::vector<SlotRef> Engine::state_of(uint32_t session, uint32_t generation) const {
    std::vector<SlotRef> slots;
    for (const StatePart& part : carried_parts(model_.config, model_.state, session, generation))
        slots.push_back(part.slot);
    return slots;
}

// A snapshot has the same slots, one right behind the other.
std::vector<SlotRef> Engine::state_of(const Snapshot& snapshot) const {
    std::vector<SlotRef> slots = state_of(0, 0);
    uint64_t at = 0;
    for (SlotRef& slot : slots) {
        slot = {snapshot.memory, at, slot.bytes};
        at += slot.bytes;
    }
    return slots;
}

void Engine::copy_state(const std::vector<SlotRef>& from, const std::vector<SlotRef>& to) {
    for (size_t i = 0; i < from.size(); ++i)
        device_->copy(from[i].buffer, from[i].offset, to[i].buffer, to[i].offset, from[i].bytes);
}

}  // namespace lily
