#include "ablation.h"

#include <algorithm>
#include <cstring>

namespace lily {

std::optional<Ablation> ablation_named(std::string_view name) {
    if (name == "none") return Ablation::kNone;
    if (name == "host_routing") return Ablation::kHostRouting;
    if (name == "expanded_weights") return Ablation::kExpandedWeights;
    if (name == "state_in_memory") return Ablation::kStateInMemory;
    if (name == "heads_apart") return Ablation::kHeadsApart;
    if (name == "one_block") return Ablation::kOneBlock;
    return std::nullopt;
}

ExpandedWeights allocate_expanded(Device& device, const Config& c) {
    const uint64_t count = uint64_t{c.experts} * c.inner * c.hidden;
    if (2 * count > UINT32_MAX)
        throw Error(ErrorKind::kUnsupported, "expanded weights of a layer are beyond 32-bit indices");
    return {.gate_up = {device.allocate("expanded gate and up", 2 * count * sizeof(act_t)), 0, 2 * count},
            .down = {device.allocate("expanded down", count * sizeof(act_t)), 0, count}};
}

// A launch by another kernel of the same slots, args and consts.
static Launch as_by(const Launch& launch, const char* kernel) {
    Launch other = launch;
    other.kernel = find_kernel(kernel);
    return other;
}

AblatedPass::AblatedPass(Device& device, const Model& model, const Pass& pass, Ablation ablation,
                         const ExpandedWeights& expanded)
    : device_(device), model_(model), pass_(pass), expanded_(expanded) {
    if (ablation == Ablation::kOneBlock) pass_.blocks = 1;
    Recorder run = record(record_body(model, pass_), ablation);
    end_part(run);
}

// Records the launches again, in an order that keeps what they need of each other, without what is left out.
Recorder AblatedPass::record(const Plan& plan, Ablation ablation) {
    Recorder run;
    for (const Launch& launch : plan.launches) {
        const std::string_view kernel = launch.kernel->name;
        run.scope(launch.label, launch.layer);
        if (ablation == Ablation::kHostRouting && kernel == "moe_histogram") {
            std::memcpy(&order_, launch.args.data(), sizeof(order_));
            end_part(run);
        } else if (ablation == Ablation::kHostRouting && (kernel == "moe_scan" || kernel == "moe_scatter")) {
            continue;
        } else if (ablation == Ablation::kExpandedWeights && kernel == "expert_mm_gate_up") {
            expand_gate_up(run, launch);
        } else if (ablation == Ablation::kExpandedWeights && kernel == "expert_mm_down") {
            expand_down(run, launch);
        } else if (ablation == Ablation::kStateInMemory && kernel == "delta_scan") {
            run.add(as_by(launch, "delta_scan_memory"));
        } else if (ablation == Ablation::kHeadsApart && kernel == "attention_blocks") {
            run.add(as_by(launch, "attention_blocks_apart"));
        } else {
            run.add(launch);
        }
    }
    return run;
}

k::expanded_mm_args AblatedPass::expand(Recorder& run, const Quant& w, Slot<act_t> to, uint32_t n) const {
    run(k::expand_weights{.w = w.w, .scales = w.scales, .biases = w.biases, .y = to, .args = {.n = w.n, .k = w.k}});
    const Config& c = model_.config;
    return {.rows = pass_.rows, .used = c.experts_used, .experts = c.experts, .n = n, .k = w.k};
}

void AblatedPass::expand_gate_up(Recorder& run, const Launch& launch) const {
    const State& s = model_.state;
    const Quant& w = model_.weights.layers[launch.layer].moe.gate_up;
    run(k::expanded_mm_gate_up{.x = s.h,
                               .pairs = s.pairs,
                               .tiles = s.expert_tiles,
                               .tile_count = s.tile_count,
                               .w = expanded_.gate_up,
                               .h = s.expert_h,
                               .args = expand(run, w, expanded_.gate_up, model_.config.inner),
                               .consts = {.BM = launch.consts[0]}});
}

void AblatedPass::expand_down(Recorder& run, const Launch& launch) const {
    const State& s = model_.state;
    const Quant& w = model_.weights.layers[launch.layer].moe.down;
    run(k::expanded_mm_down{.h = s.expert_h,
                            .pairs = s.pairs,
                            .tiles = s.expert_tiles,
                            .tile_count = s.tile_count,
                            .w = expanded_.down,
                            .y = s.expert_y,
                            .args = expand(run, w, expanded_.down, model_.config.hidden),
                            .consts = {.BM = launch.consts[0]}});
}

void AblatedPass::end_part(Recorder& run) {
    parts_.push_back(device_.prepare(run.finish("part " + std::to_string(parts_.size()))));
}

void AblatedPass::run(uint32_t times) {
    if (parts_.size() == 1) {
        const std::vector<const Program*> all(times, parts_[0].get());
        device_.wait(device_.submit(all));
        return;
    }
    for (uint32_t time = 0; time < times; ++time)
        for (size_t i = 0; i < parts_.size(); ++i) {
            if (i > 0) order_pairs();
            device_.run(*parts_[i]);
        }
}

// What moe_histogram, moe_scan and moe_scatter do: pairs in order of their experts, and the map of tiles.
void AblatedPass::order_pairs() {
    const State& s = model_.state;
    const uint32_t experts = order_.experts, tile = order_.tile;
    StepState step;
    device_.read(s.step.buffer, s.step.offset, &step, sizeof(step));
    std::vector<uint32_t> ids(step.rows * order_.used), totals(experts), places(experts), pairs(ids.size());
    device_.read(s.expert_ids.buffer, s.expert_ids.offset, ids.data(), ids.size() * sizeof(uint32_t));
    for (const uint32_t id : ids) ++totals[id];
    std::vector<uint4> tiles;
    uint32_t first = 0;
    for (uint32_t e = 0; e < experts; ++e) {
        places[e] = first;
        for (uint32_t done = 0; done < totals[e]; done += tile)
            tiles.push_back({e, first + done, std::min(tile, totals[e] - done), 0});
        first += totals[e];
    }
    for (uint32_t i = 0; i < ids.size(); ++i) pairs[places[ids[i]]++] = i;
    const auto tile_count = static_cast<uint32_t>(tiles.size());
    device_.write(s.expert_tiles.buffer, s.expert_tiles.offset, tiles.data(), tiles.size() * sizeof(uint4));
    device_.write(s.tile_count.buffer, s.tile_count.offset, &tile_count, sizeof(tile_count));
    device_.write(s.pairs.buffer, s.pairs.offset, pairs.data(), pairs.size() * sizeof(uint32_t));
}

}  // namespace lily
