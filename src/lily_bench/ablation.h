// Prefill and decode without one of their design decisions, to measure what that decision gains. In builds for
// benchmarks only.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "device.h"
#include "kernels.gen.h"
#include "model.h"

namespace lily {

enum class Ablation {
    kNone,
    kHostRouting,      // the host puts pairs of (row, choice) in order, and the device waits for it in every layer
    kExpandedWeights,  // experts' weights are written to memory as act_t, and read from there
    kStateInMemory,    // the state of the delta rule goes to memory and back for every token
    kHeadsApart,       // decode: query heads of a KV head have threadgroups, and reads of the cache, of their own
    kOneBlock,         // decode: a threadgroup attends to all of a context
};

// Nothing for another name.
std::optional<Ablation> ablation_named(std::string_view name);

// Room for one layer's experts. It stays the device's until that closes.
struct ExpandedWeights {
    Slot<act_t> gate_up{};  // [experts, 2 * inner, hidden]
    Slot<act_t> down{};     // [experts, hidden, inner]
};

ExpandedWeights allocate_expanded(Device& device, const Config& config);

// A recorded pass. expanded: for that ablation.
class AblatedPass {
public:
    AblatedPass(Device& device, const Model& model, const Pass& pass, Ablation ablation,
                const ExpandedWeights& expanded);
    // Carries it out so many times, one after the other.
    void run(uint32_t times = 1);

private:
    Recorder record(const Plan& plan, Ablation ablation);
    // Records the expansion of a matrix; returns the args of the product by it, which has n columns an expert.
    k::expanded_mm_args expand(Recorder& run, const Quant& w, Slot<act_t> to, uint32_t n) const;
    void expand_gate_up(Recorder& run, const Launch& launch) const;
    void expand_down(Recorder& run, const Launch& launch) const;
    void end_part(Recorder& run);
    void order_pairs();
    Device& device_;
    const Model& model_;
    Pass pass_;
    ExpandedWeights expanded_;
    k::moe_order_args order_{};                    // of the launches that the host stands in for
    std::vector<std::unique_ptr<Program>> parts_;  // the host puts pairs in order between each two
};

}  // namespace lily
