#include "nan_device.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "float_words.h"

namespace lily {
namespace {

// A banned token has the logit -inf, and so has the best of a block of banned ones.
constexpr std::pair<std::string_view, std::string_view> kMayBeInfinite[] = {
    {"sample_adjust", "adjusted"}, {"sample_bias", "adjusted"}, {"sample_reduce", "stats"}};

bool may_be_infinite(const KernelInfo& kernel, const SlotInfo& slot) {
    const std::pair<std::string_view, std::string_view> key{kernel.name, slot.name};
    return std::find(std::begin(kMayBeInfinite), std::end(kMayBeInfinite), key) != std::end(kMayBeInfinite);
}

// A slot's numbers: where they are, or a copy where the host cannot reach them.
class Numbers {
public:
    Numbers(Device& device, const SlotRef& slot, uint64_t bytes) : device_(device), slot_(slot), bytes_(bytes) {
        std::byte* const mapped = device.map(slot.buffer);
        if (mapped != nullptr) {
            data_ = mapped + slot.offset;
            return;
        }
        copy_.resize(bytes);
        device.read(slot.buffer, slot.offset, copy_.data(), bytes);
        data_ = copy_.data();
    }

    template <class Word>
    Word get(uint64_t i) const {
        Word word;
        std::memcpy(&word, data_ + i * sizeof(Word), sizeof(Word));
        return word;
    }

    template <class Word>
    void set(uint64_t i, Word word) {
        std::memcpy(data_ + i * sizeof(Word), &word, sizeof(Word));
        changed_ = true;
    }
    void finish() {
        if (changed_ && !copy_.empty()) device_.write(slot_.buffer, slot_.offset, copy_.data(), bytes_);
    }

private:
    Device& device_;
    const SlotRef slot_;
    const uint64_t bytes_;
    std::byte* data_;
    std::vector<std::byte> copy_;
    bool changed_ = false;
};

// One written slot of a launch. A launch writes the rows that there are, and what lies beside them is as old as it may
// be. So what is NaN or infinite beforehand becomes one certain NaN, and where that still is afterwards nothing was
// written: no launch but a wrong one reads there, and a repeated call finds the same again.
class Watch {
public:
    Watch(const KernelInfo& kernel, const SlotInfo& slot, const SlotRef& place, uint64_t count)
        : slot_(slot), place_(place), count_(count), infinite_(may_be_infinite(kernel, slot)) {}

    void before(Device& device) {
        marked_.clear();
        with_format(slot_.type, [&](auto format) { mark<decltype(format)>(device); });
    }

    // How many numbers were written that are none.
    uint64_t after(Device& device) const {
        uint64_t found = 0;
        with_format(slot_.type, [&](auto format) { found = count_new<decltype(format)>(device); });
        return found;
    }

    const char* name() const { return slot_.name; }
    uint64_t count() const { return count_; }

private:
    // An unlikely payload, of a NaN that signals nothing.
    template <class Format>
    static constexpr typename Format::Word kMark =
        Format::kInfinity | (Format::kInfinity & -Format::kInfinity) >> 1 | 0x1a;

    template <class Format>
    bool wrong(typename Format::Word word) const {
        const auto size = static_cast<typename Format::Word>(word & ~Format::kSign);
        return infinite_ ? size > Format::kInfinity : size >= Format::kInfinity;
    }

    // Without a branch, so that the compiler vectorises it.
    template <class Format>
    uint64_t count_all(const Numbers& numbers) const {
        uint64_t found = 0;
        for (uint64_t i = 0; i < count_; ++i) found += wrong<Format>(numbers.get<typename Format::Word>(i)) ? 1 : 0;
        return found;
    }

    template <class Format>
    void mark(Device& device) {
        using Word = typename Format::Word;
        Numbers numbers(device, place_, count_ * sizeof(Word));
        if (count_all<Format>(numbers) == 0) return;
        for (uint64_t i = 0; i < count_; ++i) {
            if (!wrong<Format>(numbers.get<Word>(i))) continue;
            numbers.set<Word>(i, kMark<Format>);
            marked_.push_back(static_cast<uint32_t>(i));
        }
        numbers.finish();
    }

    template <class Format>
    uint64_t count_new(Device& device) const {
        using Word = typename Format::Word;
        const Numbers numbers(device, place_, count_ * sizeof(Word));
        if (marked_.empty()) return count_all<Format>(numbers);
        auto next = marked_.begin();
        uint64_t found = 0;
        for (uint64_t i = 0; i < count_; ++i) {
            const Word word = numbers.get<Word>(i);
            const bool was_marked = next != marked_.end() && *next == i;
            if (was_marked) ++next;
            if (wrong<Format>(word) && !(was_marked && word == kMark<Format>)) ++found;
        }
        return found;
    }

    const SlotInfo& slot_;
    const SlotRef place_;
    const uint64_t count_;
    const bool infinite_;
    std::vector<uint32_t> marked_;  // ascending
};

struct WatchedLaunch {
    std::unique_ptr<Program> program;
    const KernelInfo* kernel;
    const char* label;
    int32_t layer;
    std::vector<Watch> slots;
};

class NanProgram final : public Program {
public:
    std::vector<WatchedLaunch> launches;
};

class NanDevice final : public Device {
public:
    explicit NanDevice(std::unique_ptr<Device> device) : device_(std::move(device)) {}

    std::unique_ptr<Program> prepare(const Plan& plan) override;
    Ticket submit(std::span<const Program* const> programs) override;
    void wait(Ticket) override {}  // submit() has run everything
    uint32_t queue_depth() const override { return 1; }

    BufferId allocate(const char* name, uint64_t bytes, bool shared) override {
        return device_->allocate(name, bytes, shared);
    }
    void release(BufferId buffer) override { device_->release(buffer); }
    uint64_t max_buffer_bytes() const override { return device_->max_buffer_bytes(); }
    uint64_t memory_limit() const override { return device_->memory_limit(); }
    std::byte* map(BufferId buffer) override { return device_->map(buffer); }
    void write(BufferId buffer, uint64_t offset, const void* from, uint64_t bytes) override {
        device_->write(buffer, offset, from, bytes);
    }
    void read(BufferId buffer, uint64_t offset, void* to, uint64_t bytes) override {
        device_->read(buffer, offset, to, bytes);
    }
    void copy(BufferId from, uint64_t from_offset, BufferId to, uint64_t to_offset, uint64_t bytes) override {
        device_->copy(from, from_offset, to, to_offset, bytes);
    }
    std::unique_ptr<Upload> upload() override { return device_->upload(); }
    void compile(std::span<const Variant> variants) override { device_->compile(variants); }
    std::string name() const override { return device_->name(); }
    std::vector<std::pair<std::string, std::string>> info() const override { return device_->info(); }
    TileChoice tiles() const override { return device_->tiles(); }
    AttentionSplit attention_split() const override { return device_->attention_split(); }
    uint32_t prefill_rows() const override { return device_->prefill_rows(); }
    uint32_t most_rows() const override { return device_->most_rows(); }
    std::vector<Variant> variants() const override { return device_->variants(); }

private:
    void check(const WatchedLaunch& launch, const Watch& slot);

    std::unique_ptr<Device> device_;
    Ticket ticket_ = 0;
};

std::unique_ptr<Program> NanDevice::prepare(const Plan& plan) {
    auto program = std::make_unique<NanProgram>();
    for (uint32_t i = 0; i < plan.launches.size(); ++i) {
        const Launch& launch = plan.launches[i];
        const KernelInfo& kernel = *launch.kernel;
        WatchedLaunch watched{device_->prepare(single_launch(plan, i)), &kernel, launch.label, launch.layer, {}};
        std::array<uint64_t, kMaxSlots> counts{};
        kernel.counts(launch.args.data(), launch.consts.data(), counts.data());
        for (uint32_t s = 0; s < kernel.slot_count; ++s)
            if (kernel.slots[s].written)
                watched.slots.emplace_back(kernel, kernel.slots[s], launch.slots[s], counts[s]);
        program->launches.push_back(std::move(watched));
    }
    return program;
}

Ticket NanDevice::submit(std::span<const Program* const> programs) {
    for (const Program* program : programs) {
        for (const WatchedLaunch& launch : static_cast<const NanProgram*>(program)->launches) {
            std::vector<Watch> slots = launch.slots;
            for (Watch& slot : slots) slot.before(*device_);
            device_->run(*launch.program);
            for (const Watch& slot : slots) check(launch, slot);
        }
    }
    return ++ticket_;
}

void NanDevice::check(const WatchedLaunch& launch, const Watch& slot) {
    const uint64_t found = slot.after(*device_);
    if (found == 0) return;
    std::string where = std::string("kernel ") + launch.kernel->name;
    if (launch.label[0] != '\0') where += std::string(", ") + launch.label;
    if (launch.layer >= 0) where += ", layer " + std::to_string(launch.layer);
    throw Error(ErrorKind::kDevice, name() + ": " + where + ": " + std::to_string(found) + " of " +
                                        std::to_string(slot.count()) + " values of " + slot.name() +
                                        " are NaN or infinite");
}

}  // namespace

std::unique_ptr<Device> make_nan_device(std::unique_ptr<Device> device) {
    return std::make_unique<NanDevice>(std::move(device));
}

}  // namespace lily
