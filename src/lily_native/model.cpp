// The forward pass, top to bottom: one run(k::...) per line of math.
//
// Reference: transformers modeling_qwen3_5_moe.py. Shapes are in model.h, the math of each kernel in its shader.
#include "model.h"

#include <algorithm>

#include "kernels.gen.h"

namespace lily {
namespace {

// One launch is one statement of a few lines here; a field a line would hide the math.
// clang-format off

// y = W x, for many rows.
void encode_product(Recorder& run, const Model& m, const Pass& pass, Slot<const act_t> x, const Quant& w,
                    Slot<float> y) {
    run(k::qmm{.x = x, .step = m.state.step, .w = w.w, .scales = w.scales, .biases = w.biases, .y = y,
               .args = {.rows = pass.rows, .n = w.n, .k = w.k, .first = 0},
               .consts = {.BITS = w.bits, .BM = m.capacity.tile(pass.rows)}});
}

// h = rms_norm(x), y = W h, for the rows of a pass. x is the residual stream.
void encode_normed(Recorder& run, const Model& m, const Pass& pass, Slot<const bfloat> norm, const Quant& w,
                   Slot<float> y) {
    const State& s = m.state;
    if (pass.decode) {
        run(k::norm_qmv{.x = s.x, .norm = norm, .w = w.w, .scales = w.scales, .biases = w.biases, .h = s.h, .y = y,
                        .args = {.n = w.n, .k = w.k, .eps = m.config.rms_eps}, .consts = {.BITS = w.bits}});
    } else {
        run(k::rms_norm{.x = s.x, .w = norm, .step = s.step, .y = s.h,
                        .args = {.rows = pass.rows, .dim = w.k, .eps = m.config.rms_eps}});
        encode_product(run, m, pass, s.h, w, y);
    }
}

// y += W x, for the rows of a pass.
void encode_product_add(Recorder& run, const Model& m, const Pass& pass, Slot<const act_t> x, const Quant& w,
                        Slot<float> y) {
    if (pass.decode)
        run(k::qmv_add{.x = x, .step = m.state.step, .w = w.w, .scales = w.scales, .biases = w.biases, .y = y,
                       .args = {.rows = 1, .n = w.n, .k = w.k}, .consts = {.BITS = w.bits}});
    else
        run(k::qmm_add{.x = x, .step = m.state.step, .w = w.w, .scales = w.scales, .biases = w.biases, .y = y,
                       .args = {.rows = pass.rows, .n = w.n, .k = w.k, .first = 0},
                       .consts = {.BITS = w.bits, .BM = m.capacity.tile(pass.rows)}});
}

void encode_embed(Recorder& run, const Model& m, const Pass& pass) {
    const State& s = m.state;
    const Quant& w = m.weights.embed;
    run.scope("embed");
    run(k::embed_gather{.tokens = s.tokens, .step = s.step, .w = w.w, .scales = w.scales, .biases = w.biases, .x = s.x,
                        .args = {.rows = pass.rows, .hidden = w.k, .vocab = w.n}});
}

// What the delta rule carries over from token to token, and its output, for many rows.
void encode_delta_rows(Recorder& run, const Model& m, const Pass& pass, uint32_t layer) {
    const Config& c = m.config;
    const State& s = m.state;
    const DeltaWeights& w = m.weights.layers[layer].delta;
    const LayerState& carried = s.layers[layer];
    const uint32_t rows = pass.rows, sessions = m.capacity.sessions;
    run(k::conv_silu{.proj = s.proj, .w = w.conv, .step = s.step, .state = carried.conv, .y = s.qkv,
                     .args = {.rows = rows, .sessions = sessions, .channels = c.channels(), .proj_dim = w.in.n}});
    run(k::delta_prepare{.proj = s.proj, .a_log = w.a_log, .dt_bias = w.dt_bias, .step = s.step, .qkv = s.qkv,
                         .gates = s.gates,
                         .args = {.rows = rows, .key_heads = c.delta_key_heads, .value_heads = c.delta_value_heads,
                                  .proj_dim = w.in.n, .a = c.delta_a()}});
    run(k::delta_scan{.qkv = s.qkv, .gates = s.gates, .step = s.step, .state = carried.delta, .y = s.mixed,
                      .args = {.rows = rows, .sessions = sessions, .key_heads = c.delta_key_heads,
                               .value_heads = c.delta_value_heads}});
    run(k::gated_rms_norm{.x = s.mixed, .proj = s.proj, .w = w.norm, .step = s.step, .y = s.mixer,
                          .args = {.rows = rows, .value_heads = c.delta_value_heads, .proj_dim = w.in.n,
                                   .gate = c.channels(), .eps = c.rms_eps}});
}

// x += delta rule mixer of x.
void encode_delta(Recorder& run, const Model& m, const Pass& pass, uint32_t layer) {
    const Config& c = m.config;
    const State& s = m.state;
    const LayerWeights& w = m.weights.layers[layer];
    run.scope("delta", static_cast<int>(layer));
    encode_normed(run, m, pass, w.norm_in, w.delta.in, s.proj);
    if (pass.decode)
        run(k::delta_mix{.proj = s.proj, .conv_w = w.delta.conv, .a_log = w.delta.a_log, .dt_bias = w.delta.dt_bias,
                         .norm = w.delta.norm, .step = s.step, .conv = s.layers[layer].conv,
                         .state = s.layers[layer].delta, .y = s.mixer,
                         .args = {.sessions = m.capacity.sessions, .key_heads = c.delta_key_heads,
                                  .value_heads = c.delta_value_heads, .channels = c.channels(),
                                  .proj_dim = w.delta.in.n, .z = c.channels(), .a = c.delta_a(), .eps = c.rms_eps}});
    else
        encode_delta_rows(run, m, pass, layer);
    encode_product_add(run, m, pass, s.mixer, w.delta.out, s.x);
}

// Attention of many rows.
void encode_attention_rows(Recorder& run, const Model& m, const Pass& pass, uint32_t layer) {
    const Config& c = m.config;
    const State& s = m.state;
    const AttentionWeights& w = m.weights.layers[layer].attention;
    const LayerState& carried = s.layers[layer];
    const uint32_t rows = pass.rows, width = w.in.n, sessions = m.capacity.sessions;
    const uint32_t pages = m.capacity.pages, session_pages = m.capacity.session_pages();
    run(k::rope_write{.proj = s.proj, .q_norm = w.q_norm, .k_norm = w.k_norm, .inv_freq = m.weights.inv_freq,
                      .page_table = s.page_table, .step = s.step, .q = s.q, .k_cache = carried.k_cache,
                      .v_cache = carried.v_cache,
                      .args = {.rows = rows, .sessions = sessions, .heads = c.heads, .kv_heads = c.kv_heads,
                               .proj_dim = width, .pages = pages, .session_pages = session_pages, .eps = c.rms_eps}});
    run(k::attention_tile{.q = s.q, .proj = s.proj, .k_cache = carried.k_cache, .v_cache = carried.v_cache,
                          .page_table = s.page_table, .step = s.step, .y = s.mixer,
                          .args = {.rows = rows, .sessions = sessions, .kv_heads = c.kv_heads, .proj_dim = width,
                                   .pages = pages, .session_pages = session_pages},
                          .consts = {.GROUP = c.group()}});
}

// Attention of one row, in one block or several.
void encode_attention_row(Recorder& run, const Model& m, const Pass& pass, uint32_t layer) {
    const Config& c = m.config;
    const State& s = m.state;
    const AttentionWeights& w = m.weights.layers[layer].attention;
    const LayerState& carried = s.layers[layer];
    const k::attention_args args{.sessions = m.capacity.sessions, .kv_heads = c.kv_heads, .proj_dim = w.in.n,
                                 .pages = m.capacity.pages, .session_pages = m.capacity.session_pages(),
                                 .blocks = pass.blocks, .block = pass.block, .eps = c.rms_eps};
    if (pass.blocks == 1) {
        run(k::attention_decode{.proj = s.proj, .q_norm = w.q_norm, .k_norm = w.k_norm,
                                .inv_freq = m.weights.inv_freq, .page_table = s.page_table, .step = s.step,
                                .k_cache = carried.k_cache, .v_cache = carried.v_cache, .y = s.mixer, .args = args,
                                .consts = {.GROUP = c.group()}});
    } else {
        run(k::attention_blocks{.proj = s.proj, .q_norm = w.q_norm, .k_norm = w.k_norm,
                                .inv_freq = m.weights.inv_freq, .page_table = s.page_table, .step = s.step,
                                .k_cache = carried.k_cache, .v_cache = carried.v_cache, .sums = s.block_sums,
                                .stats = s.block_stats, .args = args, .consts = {.GROUP = c.group()}});
        run(k::attention_merge{.sums = s.block_sums, .stats = s.block_stats, .proj = s.proj, .step = s.step,
                               .y = s.mixer,
                               .args = {.kv_heads = c.kv_heads, .proj_dim = w.in.n, .blocks = pass.blocks,
                                        .block = pass.block},
                               .consts = {.GROUP = c.group()}});
    }
}

// x += gated attention of x.
void encode_attention(Recorder& run, const Model& m, const Pass& pass, uint32_t layer) {
    const LayerWeights& w = m.weights.layers[layer];
    run.scope("attention", static_cast<int>(layer));
    encode_normed(run, m, pass, w.norm_in, w.attention.in, m.state.proj);
    if (pass.decode)
        encode_attention_row(run, m, pass, layer);
    else
        encode_attention_rows(run, m, pass, layer);
    encode_product_add(run, m, pass, m.state.mixer, w.attention.out, m.state.x);
}

// The chosen experts and the shared one, for many rows: pairs of (row, choice) ordered by expert, then tiles.
void encode_expert_tiles(Recorder& run, const Model& m, const Pass& pass, const MoeWeights& w) {
    const Config& c = m.config;
    const State& s = m.state;
    const uint32_t rows = pass.rows, tile = m.capacity.expert_tile(rows, c);
    run(k::moe_route{.logits = s.route, .step = s.step, .ids = s.expert_ids, .weights = s.expert_weights,
                     .args = {.rows = rows, .n = w.router.n, .experts = c.experts, .used = c.experts_used}});
    const k::moe_order_args order{.rows = rows, .used = c.experts_used, .experts = c.experts, .tile = tile};
    run(k::moe_histogram{.ids = s.expert_ids, .step = s.step, .counts = s.expert_counts, .args = order});
    run(k::moe_scan{.counts = s.expert_counts, .step = s.step, .places = s.expert_places, .tiles = s.expert_tiles,
                    .tile_count = s.tile_count, .args = order});
    run(k::moe_scatter{.ids = s.expert_ids, .places = s.expert_places, .step = s.step, .pairs = s.pairs,
                       .args = order});
    run(k::expert_mm_gate_up{.x = s.h, .pairs = s.pairs, .tiles = s.expert_tiles, .tile_count = s.tile_count,
                             .w = w.gate_up.w, .scales = w.gate_up.scales, .biases = w.gate_up.biases, .h = s.expert_h,
                             .args = {.rows = rows, .used = c.experts_used, .experts = c.experts, .n = c.inner,
                                      .k = c.hidden},
                             .consts = {.BM = tile}});
    run(k::expert_mm_down{.h = s.expert_h, .pairs = s.pairs, .tiles = s.expert_tiles, .tile_count = s.tile_count,
                          .w = w.down.w, .scales = w.down.scales, .biases = w.down.biases, .y = s.expert_y,
                          .args = {.rows = rows, .used = c.experts_used, .experts = c.experts, .n = c.hidden,
                                   .k = c.inner},
                          .consts = {.BM = tile}});
    run(k::qmm_swiglu{.x = s.h, .step = s.step, .w = w.shared_gate_up.w, .scales = w.shared_gate_up.scales,
                      .biases = w.shared_gate_up.biases, .y = s.shared_h,
                      .args = {.rows = rows, .n = c.shared_inner, .k = c.hidden, .first = 0},
                      .consts = {.BITS = 4, .BM = m.capacity.tile(rows)}});
    encode_product(run, m, pass, s.shared_h, w.shared_down, s.shared_y);
    run(k::moe_combine{.routed = s.expert_y, .shared = s.shared_y, .weights = s.expert_weights, .step = s.step,
                       .x = s.x, .args = {.rows = rows, .used = c.experts_used, .hidden = c.hidden}});
}

// The chosen experts and the shared one, for one row.
void encode_expert_row(Recorder& run, const Model& m, const MoeWeights& w) {
    const Config& c = m.config;
    const State& s = m.state;
    const k::expert_mv_args args{.n = w.router.n, .hidden = c.hidden, .inner = c.inner,
                                 .shared_inner = c.shared_inner, .experts = c.experts, .used = c.experts_used};
    run(k::expert_mv_gate_up{.x = s.h, .logits = s.route, .w = w.gate_up.w, .scales = w.gate_up.scales,
                             .biases = w.gate_up.biases, .shared_w = w.shared_gate_up.w,
                             .shared_scales = w.shared_gate_up.scales, .shared_biases = w.shared_gate_up.biases,
                             .h = s.expert_h, .ids = s.expert_ids, .weights = s.expert_weights, .args = args});
    run(k::expert_mv_down{.h = s.expert_h, .logits = s.route, .ids = s.expert_ids, .weights = s.expert_weights,
                          .w = w.down.w, .scales = w.down.scales, .biases = w.down.biases,
                          .shared_w = w.shared_down.w, .shared_scales = w.shared_down.scales,
                          .shared_biases = w.shared_down.biases, .x = s.x, .args = args});
}

// x += mixture of experts of x. The router's product is the unrounded one at any number of rows: rounding its weights
// changes which experts are chosen (docs/PERF_LOG.md has the measurement).
void encode_moe(Recorder& run, const Model& m, const Pass& pass, uint32_t layer) {
    const State& s = m.state;
    const LayerWeights& w = m.weights.layers[layer];
    const Quant& router = w.moe.router;
    run.scope("moe", static_cast<int>(layer));
    if (pass.decode) {
        encode_normed(run, m, pass, w.norm_post, router, s.route);
        encode_expert_row(run, m, w.moe);
        return;
    }
    run(k::rms_norm{.x = s.x, .w = w.norm_post, .step = s.step, .y = s.h,
                    .args = {.rows = pass.rows, .dim = router.k, .eps = m.config.rms_eps}});
    run(k::qmv{.x = s.h, .step = s.step, .w = router.w, .scales = router.scales, .biases = router.biases, .y = s.route,
               .args = {.rows = pass.rows, .n = router.n, .k = router.k}, .consts = {.BITS = router.bits}});
    encode_expert_tiles(run, m, pass, w.moe);
}

void encode_layers(Recorder& run, const Model& m, const Pass& pass) {
    for (uint32_t layer = 0; layer < m.config.layers; ++layer) {
        if (m.config.is_attention(layer))
            encode_attention(run, m, pass, layer);
        else
            encode_delta(run, m, pass, layer);
        encode_moe(run, m, pass, layer);
    }
}

// logits of the last row.
void encode_head(Recorder& run, const Model& m, const Pass& pass) {
    const Config& c = m.config;
    const State& s = m.state;
    const Quant& w = m.weights.head;
    run.scope("head");
    run(k::rms_norm_last{.x = s.x, .w = m.weights.norm, .step = s.step, .y = s.h,
                         .args = {.rows = pass.rows, .dim = c.hidden, .eps = c.rms_eps}});
    run(k::head_logits{.x = s.h, .w = w.w, .scales = w.scales, .biases = w.biases, .step = s.step, .logits = s.logits,
                       .args = {.sessions = m.capacity.sessions, .vocab = c.vocab, .hidden = c.hidden}});
}

// Log probabilities of all rows, kScoreRows rows of logits at a time.
void encode_score(Recorder& run, const Model& m, const Pass& pass, uint32_t top) {
    const Config& c = m.config;
    const State& s = m.state;
    const Quant& w = m.weights.head;
    run.scope("score");
    run(k::rms_norm{.x = s.x, .w = m.weights.norm, .step = s.step, .y = s.h,
                    .args = {.rows = pass.rows, .dim = c.hidden, .eps = c.rms_eps}});
    for (uint32_t first = 0; first < pass.rows; first += kScoreRows) {
        const uint32_t rows = std::min(kScoreRows, pass.rows - first);
        run(k::qmm{.x = s.h.slice(uint64_t{first} * c.hidden, uint64_t{rows} * c.hidden), .step = s.step, .w = w.w,
                   .scales = w.scales, .biases = w.biases, .y = s.score_logits,
                   .args = {.rows = rows, .n = w.n, .k = w.k, .first = first},
                   .consts = {.BITS = w.bits, .BM = m.capacity.tile(rows)}});
        run(k::logprob_rows{.logits = s.score_logits, .targets = s.targets.slice(first, rows), .step = s.step,
                            .logprobs = s.logprobs.slice(first, rows),
                            .top_ids = s.top_ids.slice(uint64_t{first} * top, uint64_t{rows} * top),
                            .top_logprobs = s.top_logprobs.slice(uint64_t{first} * top, uint64_t{rows} * top),
                            .args = {.rows = rows, .vocab = c.vocab, .top = top, .first = first}});
    }
}

void encode_tail(Recorder& run, const Model& m, Tail tail) {
    const State& s = m.state;
    const k::head_args head{.sessions = m.capacity.sessions, .vocab = m.config.vocab, .hidden = m.config.hidden};
    const k::sample_args args{.sessions = m.capacity.sessions, .vocab = m.config.vocab};
    run.scope("tail");
    run(k::head_reduce{.logits = s.logits, .step = s.step, .stats = s.stats, .indices = s.indices, .args = head});
    const bool adjusted = tail != Tail::kGreedy;
    if (adjusted) {
        run(k::sample_adjust{.logits = s.logits, .params = s.params, .step = s.step, .counts = s.counts,
                             .adjusted = s.adjusted, .args = args});
        run(k::sample_bias{.ids = s.bias_ids, .values = s.bias_values, .params = s.params, .step = s.step,
                           .adjusted = s.adjusted, .args = args});
        run(k::sample_reduce{.adjusted = s.adjusted, .params = s.params, .step = s.step, .stats = s.choice_stats,
                             .indices = s.choice_indices, .args = args});
    }
    if (tail == Tail::kSampled) {
        run(k::sample_mass{.adjusted = s.adjusted, .stats = s.choice_stats, .indices = s.choice_indices,
                           .params = s.params, .step = s.step, .mass = s.mass, .args = args});
        run(k::sample_pick{.mass = s.mass, .adjusted = s.adjusted, .choice_stats = s.choice_stats,
                           .logits = s.logits, .stats = s.stats,
                           .indices = s.indices, .params = s.params, .step = s.step, .tokens = s.tokens,
                           .ring = s.ring, .args = args});
    } else {
        run(k::head_pick{.logits = s.logits, .stats = s.stats, .indices = s.indices,
                         .choice_stats = adjusted ? s.choice_stats : s.stats,
                         .choice_indices = adjusted ? s.choice_indices : s.indices, .step = s.step, .tokens = s.tokens,
                         .ring = s.ring, .args = head});
    }
}

void encode_top(Recorder& run, const Model& m, uint32_t top) {
    const State& s = m.state;
    run.scope("top");
    run(k::logprob_next{.logits = s.logits, .step = s.step, .top_ids = s.top_ids, .top_logprobs = s.top_logprobs,
                        .args = {.sessions = m.capacity.sessions, .vocab = m.config.vocab, .top = top}});
}

// clang-format on

std::string pass_name(const Pass& pass) {
    if (!pass.decode) return "prefill_" + std::to_string(pass.rows);
    return "decode_" + std::to_string(uint64_t{pass.blocks} * pass.block);
}

}  // namespace

Plan record_body(const Model& model, const Pass& pass) {
    Recorder run;
    encode_embed(run, model, pass);
    encode_layers(run, model, pass);
    encode_head(run, model, pass);
    return run.finish(pass_name(pass));
}

Plan record_score(const Model& model, const Pass& pass, uint32_t top) {
    Recorder run;
    encode_embed(run, model, pass);
    encode_layers(run, model, pass);
    encode_score(run, model, pass, top);
    encode_head(run, model, pass);
    return run.finish("score_" + std::to_string(pass.rows));
}

Plan record_tail(const Model& model, Tail tail) {
    Recorder run;
    encode_tail(run, model, tail);
    return run.finish(tail == Tail::kGreedy ? "greedy" : tail == Tail::kSampled ? "sampled" : "adjusted_greedy");
}

Plan record_top(const Model& model, uint32_t top) {
    Recorder run;
    encode_top(run, model, top);
    return run.finish("top");
}

}  // namespace lily
