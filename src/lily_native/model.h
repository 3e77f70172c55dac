// Every noun of the model: its configuration, its weights and its state, as typed slices of device memory.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "kernel.h"
#include "plan.h"
#include "work_split.h"

namespace lily {

// Counts of a checkpoint. Head geometry is fixed (shape.h).
struct Config {
    uint32_t vocab = 0;
    uint32_t hidden = 0;
    uint32_t layers = 0;
    uint32_t heads = 0;  // query heads of attention
    uint32_t kv_heads = 0;
    uint32_t delta_key_heads = 0;
    uint32_t delta_value_heads = 0;
    uint32_t experts = 0;
    uint32_t experts_used = 0;
    uint32_t inner = 0;               // width of an expert
    uint32_t shared_inner = 0;        // width of the shared expert
    uint32_t attention_interval = 0;  // layer i is attention when (i + 1) % attention_interval == 0
    float rms_eps = 0;
    float rope_theta = 0;

    bool is_attention(uint32_t layer) const { return (layer + 1) % attention_interval == 0; }
    uint32_t group() const { return heads / kv_heads; }
    uint32_t channels() const { return (2 * delta_key_heads + delta_value_heads) * DELTA_DIM; }
    uint32_t delta_a() const { return channels() + delta_value_heads * DELTA_DIM; }  // column of the delta projection
    // Elements of what one session carries in a layer, and of a token in one of a layer's caches.
    uint64_t conv_state() const { return uint64_t{CONV_TAIL} * channels(); }
    uint64_t delta_state() const { return uint64_t{delta_value_heads} * DELTA_DIM * DELTA_DIM; }
    uint64_t cache_row() const { return uint64_t{kv_heads} * HEAD_DIM; }
    // Widths of the fused projections, padded to whole tiles: q|k|v|z|a|b, q and gate|k|v, experts|shared gate.
    uint32_t delta_width() const;
    uint32_t attention_width() const { return (2 * heads + 2 * kv_heads) * HEAD_DIM; }
    uint32_t router_width() const;
};

// Throws kUnsupported or kCheckpoint for counts that no kernel can run.
void check_config(const Config& config);

// Pages that hold so many tokens of a session.
constexpr size_t pages_of(size_t tokens) {
    return (tokens + PAGE - 1) / PAGE;
}

// How much of everything is allocated.
struct Capacity {
    uint32_t context = 0;  // tokens of a session
    uint32_t chunk = 0;    // rows of the largest prefill step
    uint32_t sessions = 0;
    uint32_t pages = 0;           // of the cache, for all sessions
    std::vector<uint32_t> tiles;  // of TileChoice
    uint32_t floors = 1;          // of TileChoice
    AttentionSplit split;

    uint32_t session_pages() const { return static_cast<uint32_t>(pages_of(context)); }
    uint32_t attention_blocks() const { return std::min((context + split.block - 1) / split.block, split.most); }
    // Height of the tiles in which `rows` rows are multiplied by one matrix.
    uint32_t tile(uint32_t rows) const;
    // Height of the tiles of experts that take their choices of `rows` rows.
    uint32_t expert_tile(uint32_t rows, const Config& config) const;
};

// Hands out 256-byte aligned slices of a few buffers, none larger than `limit`. Run once to learn the sizes, and
// again with the buffers that were allocated for them.
class Carver {
public:
    explicit Carver(uint64_t limit, std::vector<BufferId> buffers = {}) : limit_(limit), buffers_(std::move(buffers)) {}
    template <class T>
    Slot<T> take(uint64_t count) {
        // Shaders index with 32 bits inside a slice.
        if (count > UINT32_MAX)
            throw Error(ErrorKind::kUnsupported, "an array of " + std::to_string(count) +
                                                     " elements is beyond 32-bit indices; lower context, "
                                                     "prefill_chunk or max_sessions");
        const SlotRef ref = take_bytes(count * sizeof(T));
        return {ref.buffer, ref.offset, count};
    }
    const std::vector<uint64_t>& sizes() const { return sizes_; }

private:
    SlotRef take_bytes(uint64_t bytes);

    uint64_t limit_;
    std::vector<BufferId> buffers_;
    std::vector<uint64_t> sizes_;
};

// One quantised matrix [n, k], or several of them one after the other.
struct Quant {
    Slot<uint4> w;        // [n, k * bits / 128]
    Slot<bfloat> scales;  // [n, k / 64]
    Slot<bfloat> biases;  // [n, k / 64]
    uint32_t n = 0;
    uint32_t k = 0;
    uint32_t bits = 4;
};

struct DeltaWeights {
    Quant in;              // q|k|v|z|a|b
    Slot<bfloat> conv;     // [channels, CONV_WIDTH]
    Slot<float> a_log;     // [value_heads]
    Slot<bfloat> dt_bias;  // [value_heads]
    Slot<bfloat> norm;     // [DELTA_DIM]
    Quant out;
};

struct AttentionWeights {
    Quant in;             // per head query|gate, then k, then v
    Slot<bfloat> q_norm;  // [HEAD_DIM]
    Slot<bfloat> k_norm;  // [HEAD_DIM]
    Quant out;
};

struct MoeWeights {
    Quant router;          // experts, then the shared expert's gate, 8-bit
    Quant gate_up;         // [experts, gate inner | up inner, hidden]
    Quant down;            // [experts, hidden, inner]
    Quant shared_gate_up;  // [gate shared_inner | up shared_inner, hidden]
    Quant shared_down;     // [hidden, shared_inner]
};

struct LayerWeights {
    Slot<bfloat> norm_in;        // [hidden]
    Slot<bfloat> norm_post;      // [hidden]
    DeltaWeights delta;          // of a delta layer
    AttentionWeights attention;  // of an attention layer
    MoeWeights moe;
};

struct Weights {
    Quant embed;  // [vocab, hidden]
    std::vector<LayerWeights> layers;
    Slot<bfloat> norm;     // [hidden]
    Quant head;            // [vocab, hidden]
    Slot<float> inv_freq;  // [ROTARY_DIM / 2], computed by the host
};

// Where a checkpoint tensor goes: `pieces` runs of equal length, `stride` bytes apart.
struct TensorTarget {
    std::string name;
    std::vector<std::string> dtypes;  // safetensors names, any of them
    std::vector<uint64_t> shape;
    SlotRef target;  // bytes: of the whole tensor as stored on the device
    uint64_t pieces = 1;
    uint64_t stride = 0;
    bool must_be_finite = false;  // checked while it is read
};

// Lays out the weights; fills `targets` with every tensor that the checkpoint must have.
Weights layout_weights(const Config& config, Carver& carver, std::vector<TensorTarget>& targets);

// What one layer carries from token to token, for all sessions.
struct LayerState {
    Slot<bfloat> k_cache;  // [pages, PAGE, kv_heads, HEAD_DIM]
    Slot<bfloat> v_cache;  // [pages, PAGE, kv_heads, HEAD_DIM]
    Slot<float> conv;      // [sessions, GENERATIONS, CONV_TAIL, channels]
    Slot<float> delta;     // [sessions, GENERATIONS, value_heads, DELTA_DIM, DELTA_DIM]
};

// Everything that is not a weight.
struct State {
    // What the host writes before a step, and reads after it.
    Slot<StepState> step;       // [1]
    Slot<uint32_t> tokens;      // [chunk]
    Slot<uint32_t> targets;     // [chunk], when scoring
    Slot<uint32_t> page_table;  // [sessions, session_pages]
    Slot<SampleParams> params;  // [sessions]
    Slot<uint32_t> bias_ids;    // [sessions, MAX_BIAS]
    Slot<float> bias_values;    // [sessions, MAX_BIAS]
    Slot<uint32_t> ring;        // [TOKEN_RING, 2]
    // What sessions keep.
    std::vector<LayerState> layers;
    Slot<float> logits;   // [sessions, GENERATIONS, vocab]
    Slot<ushort> counts;  // [sessions, GENERATIONS, vocab]
    // Activations of one step.
    Slot<float> x;                  // [chunk, hidden] residual stream
    Slot<act_t> h;                  // [chunk, hidden] normed
    Slot<float> proj;               // [chunk, widest projection]
    Slot<float> qkv;                // [chunk, channels] after the convolution
    Slot<float> gates;              // [chunk, value_heads, 2]
    Slot<float> mixed;              // [chunk, value_heads, DELTA_DIM] out of the delta rule
    Slot<act_t> q;                  // [kv_heads, chunk, group, HEAD_DIM]
    Slot<act_t> mixer;              // [chunk, widest mixer output], into the output projection
    Slot<float> block_sums;         // [attention blocks, heads, HEAD_DIM], where expert_y is
    Slot<float> block_stats;        // [attention blocks, heads, 2]
    Slot<float> route;              // [chunk, router width]
    Slot<uint32_t> expert_ids;      // [chunk, used]
    Slot<float> expert_weights;     // [chunk, used + 1]
    Slot<uint32_t> expert_counts;   // [blocks, experts]
    Slot<uint32_t> expert_places;   // [blocks, experts]
    Slot<uint4> expert_tiles;       // [chunk * used / least tile + experts]
    Slot<uint32_t> tile_count;      // [1]
    Slot<uint32_t> pairs;           // [chunk * used]
    Slot<act_t> expert_h;           // [chunk * used, inner], or decode: [used * inner + shared_inner]
    Slot<act_t> shared_h;           // [chunk, shared_inner]
    Slot<float> expert_y;           // [chunk, used, hidden]
    Slot<float> shared_y;           // [chunk, hidden]
    Slot<float> stats;              // [vocab blocks, 2] of the raw logits
    Slot<uint32_t> indices;         // [vocab blocks]
    Slot<float> choice_stats;       // [vocab blocks, 2] of the adjusted logits
    Slot<uint32_t> choice_indices;  // [vocab blocks]
    Slot<float> adjusted;           // [vocab]
    Slot<uint32_t> mass;            // [vocab]
    // Scoring.
    Slot<float> score_logits;  // [score rows, vocab]
    Slot<float> logprobs;      // [chunk]
    Slot<uint32_t> top_ids;    // [chunk, kMaxTop]
    Slot<float> top_logprobs;  // [chunk, kMaxTop]
};

inline constexpr uint32_t kMaxTop = 128;    // top_logprobs
inline constexpr uint32_t kScoreRows = 64;  // rows whose logits exist at once while scoring

// Kinds of state memory, each in buffers of its own.
struct StateCarvers {
    Carver& kv;
    Carver& recurrent;
    Carver& logits;
    Carver& scratch;
    Carver& shared;  // what the host reads while the device works
};

State layout_state(const Config& config, const Capacity& capacity, const StateCarvers& carvers);

// A part of what a session carries from token to token; row-major, the last axis fastest.
struct StatePart {
    std::string name;
    const char* dtype;  // safetensors name
    std::vector<uint64_t> shape;
    SlotRef slot;            // of a cache: the pool of all pages
    uint64_t row_bytes = 0;  // of a token in a cache's page; 0: no cache

    uint64_t bytes() const;
};

// Recurrent state and logits of a session in one generation, in a fixed order.
std::vector<StatePart> carried_parts(const Config& config, const State& state, uint32_t session, uint32_t generation);
// The caches of `tokens` tokens, in a fixed order.
std::vector<StatePart> cache_parts(const Config& config, const State& state, uint64_t tokens);

// The recorded passes. A pass is decode (one row, matrix-vector products) or prefill (up to `rows` rows, tiles).
struct Pass {
    bool decode = false;
    uint32_t rows = 1;
    uint32_t blocks = 1;        // of decode attention; 1 runs it in one block
    uint32_t block = KV_BLOCK;  // tokens of each
};

enum class Tail {
    kGreedy,          // argmax of the logits
    kAdjustedGreedy,  // argmax after penalties and biases
    kSampled,
};

struct Model {
    Config config;
    Capacity capacity;
    Weights weights;
    State state;
};

// tokens -> logits of the last row, all rows of state moved to the next generation.
Plan record_body(const Model& model, const Pass& pass);
// As record_body, and log probabilities of every row's target with the `top` most likely tokens.
Plan record_score(const Model& model, const Pass& pass, uint32_t top);
// logits -> token, step moved on.
Plan record_tail(const Model& model, Tail tail);
// The `top` most likely tokens of the next generation's logits.
Plan record_top(const Model& model, uint32_t top);

}  // namespace lily
