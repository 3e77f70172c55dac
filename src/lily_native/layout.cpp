// Where weights and state lie in device memory, and which checkpoint tensor fills which slice.
#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "model.h"

namespace lily {
namespace {

constexpr uint64_t kAlignment = 256;

uint64_t round_up(uint64_t value, uint64_t step) {
    return (value + step - 1) / step * step;
}

uint32_t whole_tiles(uint32_t rows) {
    return static_cast<uint32_t>(round_up(rows, SIZE_UNIT));
}

void require(bool ok, const std::string& what) {
    if (!ok) throw Error(ErrorKind::kUnsupported, what);
}

// Collects the targets of one checkpoint's tensors.
class Layout {
public:
    Layout(Carver& carver, std::vector<TensorTarget>& targets) : carver_(carver), targets_(targets) {}

    // A matrix of n rows in which parts of the checkpoint follow each other; n may exceed their sum (zero rows).
    Quant matrix(uint64_t n, uint32_t k, uint32_t bits) {
        Quant q;
        q.w = carver_.take<uint4>(n * k * bits / 128);
        q.scales = carver_.take<bfloat>(n * k / QUANT_GROUP);
        q.biases = carver_.take<bfloat>(n * k / QUANT_GROUP);
        q.n = static_cast<uint32_t>(n);
        q.k = k;
        q.bits = bits;
        return q;
    }

    // Checkpoint matrix `name` of `rows` rows fills q from row `first` on.
    void part(const Quant& q, const std::string& name, uint64_t first, uint64_t rows) {
        parts(q, name, {rows}, first, 1, 0);
    }

    // A stack of `count` matrices of `rows` rows each; matrix i begins at row first + i * stride.
    void stack(const Quant& q, const std::string& name, uint64_t count, uint64_t rows, uint64_t first,
               uint64_t stride) {
        parts(q, name, {count, rows}, first, count, stride);
    }

    template <class T>
    Slot<T> vector(const std::string& name, const std::vector<uint64_t>& shape, const char* dtype) {
        uint64_t count = 1;
        for (uint64_t dim : shape) count *= dim;
        const Slot<T> slot = carver_.take<T>(count);
        std::vector<std::string> dtypes{dtype};
        // A_log is the one fp32 tensor; some conversions store it as bf16 and it is widened while it is read.
        if constexpr (std::is_same_v<T, float>) dtypes.push_back("BF16");
        targets_.push_back({name, dtypes, shape, slot_ref(slot), 1, 0, true});
        return slot;
    }

private:
    void parts(const Quant& q, const std::string& name, std::vector<uint64_t> shape, uint64_t first, uint64_t pieces,
               uint64_t stride) {
        const uint64_t words = uint64_t{q.k} * q.bits / 32, groups = q.k / QUANT_GROUP;
        const uint64_t rows = shape.back() * (pieces);
        auto add = [&](const char* suffix, const char* dtype, uint64_t columns, uint64_t element, SlotRef whole,
                       bool scale) {
            std::vector<uint64_t> full = shape;
            full.push_back(columns);
            const uint64_t row_bytes = columns * element;
            targets_.push_back({name + suffix,
                                {dtype},
                                full,
                                {whole.buffer, whole.offset + first * row_bytes, rows * row_bytes},
                                pieces,
                                stride * row_bytes,
                                scale});
        };
        add(".weight", "U32", words, 4, slot_ref(q.w), false);
        add(".scales", "BF16", groups, 2, slot_ref(q.scales), true);
        add(".biases", "BF16", groups, 2, slot_ref(q.biases), true);
    }

    Carver& carver_;
    std::vector<TensorTarget>& targets_;
};

DeltaWeights layout_delta(Layout& layout, const Config& c, const std::string& name) {
    const uint64_t values = uint64_t{c.delta_value_heads} * DELTA_DIM;
    DeltaWeights w;
    w.in = layout.matrix(c.delta_width(), c.hidden, 4);
    layout.part(w.in, name + "in_proj_qkv", 0, c.channels());
    layout.part(w.in, name + "in_proj_z", c.channels(), values);
    layout.part(w.in, name + "in_proj_a", c.channels() + values, c.delta_value_heads);
    layout.part(w.in, name + "in_proj_b", c.channels() + values + c.delta_value_heads, c.delta_value_heads);
    w.conv = layout.vector<bfloat>(name + "conv1d.weight", {c.channels(), CONV_WIDTH, 1}, "BF16");
    w.a_log = layout.vector<float>(name + "A_log", {c.delta_value_heads}, "F32");
    w.dt_bias = layout.vector<bfloat>(name + "dt_bias", {c.delta_value_heads}, "BF16");
    w.norm = layout.vector<bfloat>(name + "norm.weight", {DELTA_DIM}, "BF16");
    w.out = layout.matrix(c.hidden, static_cast<uint32_t>(values), 4);
    layout.part(w.out, name + "out_proj", 0, c.hidden);
    return w;
}

AttentionWeights layout_attention(Layout& layout, const Config& c, const std::string& name) {
    const uint64_t queries = uint64_t{c.heads} * 2 * HEAD_DIM, keys = uint64_t{c.kv_heads} * HEAD_DIM;
    AttentionWeights w;
    w.in = layout.matrix(c.attention_width(), c.hidden, 4);
    layout.part(w.in, name + "q_proj", 0, queries);
    layout.part(w.in, name + "k_proj", queries, keys);
    layout.part(w.in, name + "v_proj", queries + keys, keys);
    w.q_norm = layout.vector<bfloat>(name + "q_norm.weight", {HEAD_DIM}, "BF16");
    w.k_norm = layout.vector<bfloat>(name + "k_norm.weight", {HEAD_DIM}, "BF16");
    w.out = layout.matrix(c.hidden, c.heads * HEAD_DIM, 4);
    layout.part(w.out, name + "o_proj", 0, c.hidden);
    return w;
}

MoeWeights layout_moe(Layout& layout, const Config& c, const std::string& name) {
    const uint64_t experts = c.experts;
    MoeWeights w;
    w.router = layout.matrix(c.router_width(), c.hidden, 8);
    layout.part(w.router, name + "gate", 0, experts);
    layout.part(w.router, name + "shared_expert_gate", experts, 1);
    w.gate_up = layout.matrix(experts * 2 * c.inner, c.hidden, 4);
    layout.stack(w.gate_up, name + "switch_mlp.gate_proj", experts, c.inner, 0, 2 * c.inner);
    layout.stack(w.gate_up, name + "switch_mlp.up_proj", experts, c.inner, c.inner, 2 * c.inner);
    w.down = layout.matrix(experts * c.hidden, c.inner, 4);
    layout.stack(w.down, name + "switch_mlp.down_proj", experts, c.hidden, 0, c.hidden);
    w.shared_gate_up = layout.matrix(2 * c.shared_inner, c.hidden, 4);
    layout.part(w.shared_gate_up, name + "shared_expert.gate_proj", 0, c.shared_inner);
    layout.part(w.shared_gate_up, name + "shared_expert.up_proj", c.shared_inner, c.shared_inner);
    w.shared_down = layout.matrix(c.hidden, c.shared_inner, 4);
    layout.part(w.shared_down, name + "shared_expert.down_proj", 0, c.hidden);
    return w;
}

}  // namespace

// The least height that holds as many rows, or the greatest.
static uint32_t height_for(uint32_t rows, const std::vector<uint32_t>& tiles) {
    const auto holds_all = std::lower_bound(tiles.begin(), tiles.end(), rows);
    return holds_all != tiles.end() ? *holds_all : tiles.back();
}

uint32_t Capacity::tile(uint32_t rows) const {
    return height_for(std::max(std::min(rows, kLowTile), (rows + floors - 1) / floors), tiles);
}

// Experts differ in how often they are chosen, and a second tile takes as long as the first.
uint32_t Capacity::expert_tile(uint32_t rows, const Config& config) const {
    const uint32_t mean = rows * config.experts_used / config.experts;
    return height_for(std::max(mean, std::min(2 * mean, kLowTile)), tiles);
}

uint32_t Config::delta_width() const {
    return whole_tiles(channels() + delta_value_heads * (DELTA_DIM + 2));
}

uint32_t Config::router_width() const {
    return whole_tiles(experts + 1);
}

void check_config(const Config& c) {
    for (uint32_t count : {c.vocab, c.hidden, c.layers, c.heads, c.kv_heads, c.delta_key_heads, c.delta_value_heads,
                           c.experts, c.experts_used, c.inner, c.shared_inner, c.attention_interval})
        require(count > 0, "the configuration has a count of zero");
    // Bounds that keep every product of counts below 2^32.
    require(c.vocab <= 1u << 22 && c.hidden <= 1u << 16 && c.inner <= 1u << 16 && c.shared_inner <= 1u << 16,
            "a vocabulary above 4,194,304 or a width above 65,536 is not supported");
    require(std::max({c.layers, c.heads, c.kv_heads, c.delta_key_heads, c.delta_value_heads}) <= 1024,
            "more than 1,024 layers or heads are not supported");
    for (uint32_t size : {c.vocab, c.hidden, c.inner, c.shared_inner})
        require(size % SIZE_UNIT == 0,
                "vocabulary, hidden and expert sizes must be multiples of 64, found " + std::to_string(size));
    require(c.heads % c.kv_heads == 0 && c.group() <= MAX_GROUP,
            std::to_string(c.heads) + " query heads with " + std::to_string(c.kv_heads) +
                " key heads: 1 to 8 query heads per key head are supported");
    require(c.delta_value_heads % c.delta_key_heads == 0,
            "the number of linear value heads must be a multiple of the key heads");
    require(c.hidden <= MAX_HIDDEN, "a hidden size above 8,192 is not supported");
    require(c.experts <= MAX_EXPERTS && c.experts_used <= c.experts && c.experts_used <= MAX_USED,
            std::to_string(c.experts) + " experts, " + std::to_string(c.experts_used) +
                " used per token: at most 512 experts, 32 of them used, are supported");
    require(std::isfinite(c.rms_eps) && c.rms_eps > 0 && std::isfinite(c.rope_theta) && c.rope_theta > 1,
            "rms_norm_eps must be positive and rope_theta above 1");
}

SlotRef Carver::take_bytes(uint64_t bytes) {
    bytes = round_up(std::max<uint64_t>(bytes, 1), kAlignment);
    if (bytes > limit_)
        throw Error(ErrorKind::kOutOfMemory, "one tensor needs " + std::to_string(bytes) +
                                                 " bytes, the device's buffers hold " + std::to_string(limit_));
    if (sizes_.empty() || sizes_.back() > limit_ - bytes) sizes_.push_back(0);
    const size_t index = sizes_.size() - 1;
    const BufferId buffer = index < buffers_.size() ? buffers_[index] : BufferId{static_cast<uint32_t>(index)};
    const uint64_t offset = sizes_.back();
    sizes_.back() += bytes;
    return {buffer, offset, bytes};
}

Weights layout_weights(const Config& c, Carver& carver, std::vector<TensorTarget>& targets) {
    Layout layout(carver, targets);
    const std::string root = "language_model.model.";
    Weights w;
    w.embed = layout.matrix(c.vocab, c.hidden, 4);
    layout.part(w.embed, root + "embed_tokens", 0, c.vocab);
    for (uint32_t i = 0; i < c.layers; ++i) {
        const std::string name = root + "layers." + std::to_string(i) + ".";
        LayerWeights layer;
        layer.norm_in = layout.vector<bfloat>(name + "input_layernorm.weight", {c.hidden}, "BF16");
        layer.norm_post = layout.vector<bfloat>(name + "post_attention_layernorm.weight", {c.hidden}, "BF16");
        if (c.is_attention(i))
            layer.attention = layout_attention(layout, c, name + "self_attn.");
        else
            layer.delta = layout_delta(layout, c, name + "linear_attn.");
        layer.moe = layout_moe(layout, c, name + "mlp.");
        w.layers.push_back(layer);
    }
    w.norm = layout.vector<bfloat>(root + "norm.weight", {c.hidden}, "BF16");
    w.head = layout.matrix(c.vocab, c.hidden, 4);
    layout.part(w.head, "language_model.lm_head", 0, c.vocab);
    w.inv_freq = carver.take<float>(ROTARY_DIM / 2);
    return w;
}

namespace {

void layout_activations(State& s, const Config& c, const Capacity& cap, Carver& at) {
    const uint64_t rows = cap.chunk, pairs = rows * c.experts_used, heads = c.heads;
    const uint64_t order_blocks = (pairs + ROUTE_BLOCK - 1) / ROUTE_BLOCK,
                   vocab_blocks = (c.vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK;
    s.x = at.take<float>(rows * c.hidden);
    s.h = at.take<act_t>(rows * c.hidden);
    s.proj = at.take<float>(rows * std::max(c.delta_width(), c.attention_width()));
    s.qkv = at.take<float>(rows * c.channels());
    s.gates = at.take<float>(rows * c.delta_value_heads * 2);
    s.mixed = at.take<float>(rows * c.delta_value_heads * DELTA_DIM);
    s.q = at.take<act_t>(rows * heads * HEAD_DIM);
    s.mixer = at.take<act_t>(rows * std::max(heads * HEAD_DIM, uint64_t{c.delta_value_heads} * DELTA_DIM));
    s.block_stats = at.take<float>(cap.attention_blocks() * heads * 2);
    s.route = at.take<float>(rows * c.router_width());
    s.expert_ids = at.take<uint32_t>(pairs);
    s.expert_weights = at.take<float>(rows * (c.experts_used + 1));
    s.expert_counts = at.take<uint32_t>(order_blocks * c.experts);
    s.expert_places = at.take<uint32_t>(order_blocks * c.experts);
    s.expert_tiles = at.take<uint4>(pairs / cap.tile(1) + c.experts);
    s.tile_count = at.take<uint32_t>(1);
    s.pairs = at.take<uint32_t>(pairs);
    s.expert_h = at.take<act_t>(std::max(pairs * c.inner, uint64_t{c.experts_used} * c.inner + c.shared_inner));
    s.shared_h = at.take<act_t>(rows * c.shared_inner);
    // Nothing decodes and prefills at once, so memory does not grow with the context before its blocks need more room.
    const uint64_t block_sums = cap.attention_blocks() * heads * HEAD_DIM;
    const Slot<float> either = at.take<float>(std::max(pairs * c.hidden, block_sums));
    s.expert_y = either.slice(0, pairs * c.hidden);
    s.block_sums = either.slice(0, block_sums);
    s.shared_y = at.take<float>(rows * c.hidden);
    s.stats = at.take<float>(vocab_blocks * 2);
    s.indices = at.take<uint32_t>(vocab_blocks);
    s.choice_stats = at.take<float>(vocab_blocks * 2);
    s.choice_indices = at.take<uint32_t>(vocab_blocks);
    s.adjusted = at.take<float>(c.vocab);
    s.mass = at.take<uint32_t>(c.vocab);
    s.score_logits = at.take<float>(uint64_t{std::min(kScoreRows, cap.chunk)} * c.vocab);
    s.logprobs = at.take<float>(rows);
    s.top_ids = at.take<uint32_t>(rows * kMaxTop);
    s.top_logprobs = at.take<float>(rows * kMaxTop);
}

}  // namespace

uint64_t StatePart::bytes() const {
    uint64_t elements = 1;
    for (uint64_t size : shape) elements *= size;
    return elements * (std::string_view(dtype) == "F32" ? sizeof(float) : sizeof(bfloat));
}

std::vector<StatePart> carried_parts(const Config& c, const State& state, uint32_t session, uint32_t generation) {
    const uint64_t row = uint64_t{session} * GENERATIONS + generation;
    std::vector<StatePart> parts;
    auto add = [&](const std::string& name, const Slot<float>& pool, uint64_t count, std::vector<uint64_t> shape) {
        parts.push_back({name, "F32", std::move(shape), slot_ref(pool.slice(row * count, count))});
    };
    for (uint32_t i = 0; i < c.layers; ++i) {
        if (c.is_attention(i)) continue;
        const std::string name = "layers." + std::to_string(i) + ".";
        add(name + "conv", state.layers[i].conv, c.conv_state(), {CONV_TAIL, c.channels()});
        add(name + "delta", state.layers[i].delta, c.delta_state(), {c.delta_value_heads, DELTA_DIM, DELTA_DIM});
    }
    add("logits", state.logits, c.vocab, {c.vocab});
    return parts;
}

std::vector<StatePart> cache_parts(const Config& c, const State& state, uint64_t tokens) {
    std::vector<StatePart> parts;
    const uint64_t row_bytes = c.cache_row() * sizeof(bfloat);
    for (uint32_t i = 0; i < c.layers; ++i) {
        if (!c.is_attention(i)) continue;
        const std::string name = "layers." + std::to_string(i) + ".";
        const std::vector<uint64_t> shape{tokens, c.kv_heads, HEAD_DIM};
        parts.push_back({name + "k", "BF16", shape, slot_ref(state.layers[i].k_cache), row_bytes});
        parts.push_back({name + "v", "BF16", shape, slot_ref(state.layers[i].v_cache), row_bytes});
    }
    return parts;
}

State layout_state(const Config& c, const Capacity& cap, const StateCarvers& carvers) {
    State s;
    const uint64_t sessions = cap.sessions;
    const uint64_t page_elements = PAGE * c.cache_row();
    s.step = carvers.scratch.take<StepState>(1);
    s.tokens = carvers.scratch.take<uint32_t>(cap.chunk);
    s.targets = carvers.scratch.take<uint32_t>(cap.chunk);
    s.page_table = carvers.scratch.take<uint32_t>(sessions * cap.session_pages());
    s.params = carvers.scratch.take<SampleParams>(sessions);
    s.bias_ids = carvers.scratch.take<uint32_t>(sessions * MAX_BIAS);
    s.bias_values = carvers.scratch.take<float>(sessions * MAX_BIAS);
    s.ring = carvers.shared.take<uint32_t>(TOKEN_RING * 2);
    for (uint32_t i = 0; i < c.layers; ++i) {
        LayerState layer;
        if (c.is_attention(i)) {
            layer.k_cache = carvers.kv.take<bfloat>(cap.pages * page_elements);
            layer.v_cache = carvers.kv.take<bfloat>(cap.pages * page_elements);
        } else {
            layer.conv = carvers.recurrent.take<float>(sessions * GENERATIONS * c.conv_state());
            layer.delta = carvers.recurrent.take<float>(sessions * GENERATIONS * c.delta_state());
        }
        s.layers.push_back(layer);
    }
    s.logits = carvers.logits.take<float>(sessions * GENERATIONS * c.vocab);
    s.counts = carvers.logits.take<ushort>(sessions * GENERATIONS * c.vocab);
    layout_activations(s, c, cap, carvers.scratch);
    return s;
}

}  // namespace lily
