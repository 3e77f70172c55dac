#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpu_object.h"
#include "device.h"
#include "error.h"
#include "thread_pool.h"

namespace lily {
namespace {

constexpr uint64_t kHugePage = 2u << 20;
constexpr uint64_t kHugeBuffer = 4u << 20;    // from this size on, huge pages save address translation
constexpr uint64_t kInlineBytes = 32u << 10;  // a stage that touches less is done before a thread has woken up

// The folder of the library that this code is in.
std::string own_folder() {
    Dl_info info{};
    if (dladdr(reinterpret_cast<const void*>(&make_cpu_device), &info) == 0 || info.dli_fname == nullptr)
        throw Error(ErrorKind::kDevice, "cpu: cannot tell where the library was loaded from");
    const std::string path = info.dli_fname;
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash);
}

const char* best_object() {
#if defined(__x86_64__)
    // The level as the compiler understands it; AVX2 alone does not promise the others.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt"))
        return "liblily_cpu_v3";
#endif
    return "liblily_cpu_baseline";
}

// Objects stay loaded until the process ends: threads may still be inside their thread-local storage.
const CpuObject* open_object(const std::string& name, uint32_t width) {
    const std::string path = own_folder() + "/" + name + ".so";
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* reason = dlerror();
        throw Error(ErrorKind::kDevice, "cpu: cannot open " + path + ": " + (reason ? reason : "unknown reason"));
    }
    using Entry = const CpuObject* (*)();
    const auto entry = reinterpret_cast<Entry>(dlsym(handle, "lily_cpu_object"));
    if (entry == nullptr) throw Error(ErrorKind::kDevice, "cpu: " + path + " is not a Lily object");
    const CpuObject* object = entry();
    if (object->table_hash != kTableHash || object->width != width)
        throw Error(ErrorKind::kDevice, "cpu: " + path + " was built from other shaders than this library");
    return object;
}

std::string describe_consts(const KernelInfo& kernel, const Consts& consts) {
    std::string text;
    for (uint32_t i = 0; i < kernel.const_count; ++i)
        text += std::string(i ? ", " : "") + kernel.consts[i].name + "=" + std::to_string(consts[i]);
    return text;
}

struct Mapping {
    std::byte* address = nullptr;
    uint64_t bytes = 0;
};

// Zero pages that the system commits when they are touched. {nullptr} when there is no room.
Mapping map_zeros(uint64_t wanted) {
    const bool huge = wanted >= kHugeBuffer;
    const uint64_t unit = huge ? kHugePage : 4096;
    if (wanted > UINT64_MAX - 2 * kHugePage) return {};
    const uint64_t bytes = (std::max<uint64_t>(wanted, 1) + unit - 1) / unit * unit;
    const uint64_t reserved = huge ? bytes + kHugePage : bytes;
    void* start = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (start == MAP_FAILED) return {};
    auto* address = static_cast<std::byte*>(start);
    if (!huge) return {address, bytes};
    // Cut to whole huge pages.
    const uint64_t before = (kHugePage - reinterpret_cast<uintptr_t>(address) % kHugePage) % kHugePage;
    if (before > 0) munmap(address, before);
    if (before < kHugePage) munmap(address + before + bytes, kHugePage - before);
#if defined(MADV_HUGEPAGE)
    madvise(address + before, bytes, MADV_HUGEPAGE);  // a hint: failure costs speed only
#endif
    return {address + before, bytes};
}

// A launch with all that running it needs.
struct Item {
    const Launch* launch;
    const CpuKernel* kernel;
    CpuRun run;
    std::array<void*, kMaxSlots> slots;
    uint32_t groups;
    uint32_t groups_per_chunk;
    uint32_t first_chunk;
    std::atomic<const char*> error;
};

// Items of one stage, split into chunks that threads take.
struct Stage {
    Item* first;
    uint32_t count;
    uint32_t chunks;
    bool alone;                      // too little work to wake a thread for
    uint32_t stride = 1, start = 0;  // chunk i is the (i * stride + start) % chunks th of the items' own
};

class CpuProgram final : public Program {
public:
    explicit CpuProgram(const Plan& plan)
        : launches(plan.launches), items(std::make_unique<Item[]>(plan.launches.size())) {}

    std::vector<Launch> launches;
    std::unique_ptr<Item[]> items;
    std::vector<Stage> stages;
};

class CpuDevice final : public Device {
public:
    CpuDevice(uint32_t width, uint32_t threads, const std::string& object, uint32_t shuffle);
    ~CpuDevice() override;

    BufferId allocate(const char* name, uint64_t bytes, bool shared) override;
    void release(BufferId buffer) override;
    uint64_t max_buffer_bytes() const override { return UINT64_MAX; }
    uint64_t memory_limit() const override { return UINT64_MAX; }
    std::byte* map(BufferId buffer) override { return mapping(buffer).address; }
    void compile(std::span<const Variant> variants) override;
    std::unique_ptr<Program> prepare(const Plan& plan) override;
    Ticket submit(std::span<const Program* const> programs) override;
    void wait(Ticket) override {}  // submit() has run everything
    uint32_t queue_depth() const override { return 1; }
    std::string name() const override { return object_->width == 1 ? "cpu" : "cpu32"; }
    std::vector<std::pair<std::string, std::string>> info() const override;
    TileChoice tiles() const override;
    uint32_t prefill_rows() const override { return object_->width == 1 ? kPrefillChunk : kWidePrefillChunk; }
    std::vector<Variant> variants() const override;

private:
    const Mapping& mapping(BufferId buffer) const;
    const CpuKernel& find(const KernelInfo& kernel, const Consts& consts) const;
    void place(const Launch& launch, Item& item) const;
    void split(Stage& stage);
    void run_stage(const Stage& stage);
    [[noreturn]] void fail(const Stage& stage, const Item& item) const;

    const CpuObject* object_;
    std::vector<std::vector<const CpuKernel*>> variants_;  // by KernelInfo::index
    std::vector<Mapping> buffers_;
    std::vector<uint32_t> free_;
    std::unique_ptr<ThreadPool> pool_;
    uint32_t shuffle_;
    std::minstd_rand random_;
    Ticket ticket_ = 0;
};

CpuDevice::CpuDevice(uint32_t width, uint32_t threads, const std::string& object, uint32_t shuffle)
    : object_(open_object(object, width)),
      variants_(kKernelCount),
      pool_(std::make_unique<ThreadPool>(threads > 0 ? threads : usable_cores())),
      shuffle_(shuffle),
      random_(shuffle) {
    for (uint32_t i = 0; i < object_->count; ++i)
        variants_.at(object_->kernels[i].kernel).push_back(&object_->kernels[i]);
}

CpuDevice::~CpuDevice() {
    for (const Mapping& buffer : buffers_)
        if (buffer.address != nullptr) munmap(buffer.address, buffer.bytes);
    // After fork() the pool's threads are missing, and its destructor would wait for them for ever.
    if (!pool_->usable()) static_cast<void>(pool_.release());
}

BufferId CpuDevice::allocate(const char* name, uint64_t bytes, bool) {
    if (free_.empty()) {  // a place first, also for release(): nothing may fail between the memory and its entry
        buffers_.emplace_back();
        free_.reserve(buffers_.size());
        free_.push_back(static_cast<uint32_t>(buffers_.size() - 1));
    }
    const Mapping made = map_zeros(bytes);
    if (made.address == nullptr)
        throw Error(ErrorKind::kOutOfMemory,
                    std::string(name) + ": cannot allocate " + std::to_string(bytes) + " bytes");
    const uint32_t index = free_.back();
    free_.pop_back();
    buffers_[index] = made;
    return {index};
}

void CpuDevice::release(BufferId buffer) {
    const Mapping old = mapping(buffer);
    munmap(old.address, old.bytes);
    buffers_[buffer.index] = {};
    free_.push_back(buffer.index);
}

const Mapping& CpuDevice::mapping(BufferId buffer) const {
    if (buffer.index >= buffers_.size() || buffers_[buffer.index].address == nullptr)
        throw Error(ErrorKind::kLogic, "cpu: no buffer " + std::to_string(buffer.index));
    return buffers_[buffer.index];
}

// The most specialised variant that can run a launch.
const CpuKernel& CpuDevice::find(const KernelInfo& kernel, const Consts& consts) const {
    const CpuKernel* best = nullptr;
    int best_score = -1;
    for (const CpuKernel* candidate : variants_[kernel.index]) {
        const int score = variant_score(kernel, candidate->consts, consts);
        if (score > best_score) {
            best = candidate;
            best_score = score;
        }
    }
    if (best == nullptr)
        throw Error(ErrorKind::kUnsupported, name() + ": kernel " + kernel.name + " is not compiled for (" +
                                                 describe_consts(kernel, consts) + ")");
    return *best;
}

void CpuDevice::place(const Launch& launch, Item& item) const {
    item.launch = &launch;
    item.kernel = &find(*launch.kernel, launch.consts);
    item.error.store(nullptr, std::memory_order_relaxed);
    for (uint32_t i = 0; i < launch.kernel->slot_count; ++i) {
        const SlotRef& slot = launch.slots[i];
        const Mapping& buffer = mapping(slot.buffer);
        if (slot.offset > buffer.bytes || slot.bytes > buffer.bytes - slot.offset)
            throw Error(ErrorKind::kLogic,
                        std::string(launch.kernel->name) + "." + launch.kernel->slots[i].name + ": leaves its buffer");
        item.slots[i] = buffer.address + slot.offset;
    }
    item.run.slots = item.slots.data();
    item.run.args = launch.args.data();
    item.kernel->grid(item.run.args, item.run.grid);
    const uint64_t groups = uint64_t{item.run.grid[0]} * item.run.grid[1] * item.run.grid[2];
    if (groups > UINT32_MAX)
        throw Error(ErrorKind::kLogic, std::string(launch.kernel->name) + ": the grid has too many threadgroups");
    item.groups = static_cast<uint32_t>(groups);
}

void CpuDevice::compile(std::span<const Variant> variants) {
    for (const Variant& variant : variants) find(*variant.kernel, variant.consts);
}

std::unique_ptr<Program> CpuDevice::prepare(const Plan& plan) {
    auto program = std::make_unique<CpuProgram>(plan);
    const std::vector<Launch>& launches = program->launches;
    for (size_t i = 0; i < launches.size(); ++i) {
        place(launches[i], program->items[i]);
        if (i == 0 || launches[i].stage != launches[i - 1].stage)
            program->stages.push_back({&program->items[i], 0, 0, true});
        ++program->stages.back().count;
    }
    for (Stage& stage : program->stages) split(stage);
    return program;
}

void CpuDevice::split(Stage& stage) {
    uint64_t groups = 0, bytes = 0;
    for (Item& item : std::span(stage.first, stage.count)) {
        groups += item.groups;
        for (uint32_t slot = 0; slot < item.launch->kernel->slot_count; ++slot) bytes += item.launch->slots[slot].bytes;
    }
    stage.alone = pool_->size() == 1 || groups <= 1 || bytes <= kInlineBytes;
    // Many chunks per thread even out threadgroups of unequal length, and spread those of a grid's beginning: of the
    // tiles of experts, none but the first ones may have work.
    const uint32_t chunks_per_launch = shuffle_ ? UINT32_MAX : stage.alone ? 1 : pool_->size() * 64;
    for (Item& item : std::span(stage.first, stage.count)) {
        item.first_chunk = stage.chunks;
        item.groups_per_chunk = std::max(1u, (item.groups - 1) / chunks_per_launch + 1);
        stage.chunks += (item.groups + item.groups_per_chunk - 1) / item.groups_per_chunk;
    }
    if (!shuffle_ || stage.chunks == 0) return;
    stage.start = random_() % stage.chunks;
    do stage.stride = random_() % stage.chunks + 1;
    while (std::gcd(stage.stride, stage.chunks) != 1);
}

Ticket CpuDevice::submit(std::span<const Program* const> programs) {
    if (!pool_->usable()) throw Error(ErrorKind::kDevice, "cpu: the engine cannot be used after fork()");
    for (const Program* program : programs)
        for (const Stage& stage : static_cast<const CpuProgram*>(program)->stages) run_stage(stage);
    return ++ticket_;
}

void run_chunk(void* context, uint32_t chunk) {
    const Stage& stage = *static_cast<const Stage*>(context);
    chunk = static_cast<uint32_t>((uint64_t{chunk} * stage.stride + stage.start) % stage.chunks);
    uint32_t i = stage.count - 1;
    while (stage.first[i].first_chunk > chunk) --i;
    Item& item = stage.first[i];
    const uint32_t first = (chunk - item.first_chunk) * item.groups_per_chunk;
    const uint32_t last = std::min(item.groups - first, item.groups_per_chunk) + first;
    const char* error = item.kernel->run(item.run, first, last);
    if (error != nullptr) item.error.store(error, std::memory_order_relaxed);
}

// Launches of a stage are independent, so their threadgroups go to the pool together.
void CpuDevice::run_stage(const Stage& stage) {
    Stage shared = stage;
    if (stage.alone) {
        for (uint32_t chunk = 0; chunk < stage.chunks; ++chunk) run_chunk(&shared, chunk);
    } else {
        pool_->run(stage.chunks, &run_chunk, &shared);
    }
    for (const Item& item : std::span(stage.first, stage.count))
        if (item.error.load(std::memory_order_relaxed) != nullptr) fail(stage, item);
}

void CpuDevice::fail(const Stage& stage, const Item& item) const {
    const Launch& launch = *item.launch;
    std::string where = std::string("kernel ") + launch.kernel->name;
    if (launch.label[0] != '\0') where += std::string(", ") + launch.label;
    if (launch.layer >= 0) where += ", layer " + std::to_string(launch.layer);
    const char* error = item.error.load(std::memory_order_relaxed);
    for (Item* each = stage.first; each < stage.first + stage.count; ++each) each->error = nullptr;
    throw Error(ErrorKind::kDevice, name() + ": " + where + ": " + error);
}

std::vector<std::pair<std::string, std::string>> CpuDevice::info() const {
    return {{"device", name()},
            {"instruction_set", object_->isa},
            {"threads", std::to_string(pool_->size())},
            {"simd_width", std::to_string(object_->width)}};
}

// Width 1 visits the rows that there are, so its tiles need but one height.
TileChoice CpuDevice::tiles() const {
    const std::span<const uint32_t> all = kGpuTileRows;
    return {.rows = object_->width == 1 ? all.last(1) : all};
}

std::vector<Variant> CpuDevice::variants() const {
    std::vector<Variant> all;
    for (uint32_t i = 0; i < object_->count; ++i) {
        const CpuKernel& kernel = object_->kernels[i];
        Variant variant{&kKernels[kernel.kernel], {}};
        std::copy(std::begin(kernel.consts), std::end(kernel.consts), variant.consts.begin());
        all.push_back(variant);
    }
    return all;
}

}  // namespace

std::unique_ptr<Device> make_cpu_device(uint32_t width, uint32_t threads, const char* object, uint32_t shuffle) {
    if (width != 1 && width != 32) throw Error(ErrorKind::kValue, "cpu: the SIMD width is 1 or 32");
    if (object == nullptr) object = width == 1 ? best_object() : "liblily_cpu32";
    return std::make_unique<CpuDevice>(width, threads, object, shuffle);
}

}  // namespace lily
