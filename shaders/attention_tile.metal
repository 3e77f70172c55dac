// attention_tile.metal -- causal attention of a chunk's rows over the paged cache (prefill), with the output gate.
//
//   y[row][head] = sigmoid(gate[row][head]) * sum_t softmax_t(q . k[t]) v[t],   t <= position of the row
//
// Softmax is online, in fp32, over tiles of 64 tokens that begin at absolute multiples of 64; no buffer grows with
// rows x length. The rows of a matrix tile are (row, query head) pairs of one KV head, so that all its query heads
// share the staged k and v. Scores come from q and k in act_t, probabilities are act_t, all sums fp32.
// Reference: transformers Qwen3_5MoeAttention, eager_attention_forward; Dao et al., FlashAttention (2022), algorithm 1.
#include "tile.h"

struct attention_tile_args {
    uint rows;
    uint sessions;
    uint kv_heads;
    uint proj_dim;
    uint pages;
    uint session_pages;
};

// Stages 64 dims of TILE_K cache rows from token `first` on as act_t; tokens from `end` on become zero.
template <uint THREADS>
inline void stage_cache(threadgroup act_t* tile, device const bfloat* cache, device const uint* table, uint kv_heads,
                        uint kv_head, uint dim, uint first, uint end, uint tid) {
    for (uint t = tid; t < TILE_K * (TILE_K / 8); t += THREADS) {
        const uint row = t / (TILE_K / 8), col = t % (TILE_K / 8) * 8, token = first + row;
        uint4 v = uint4(0u);
        if (token < end) v = acts8(cache + (cache_row(table, token) * kv_heads + kv_head) * HEAD_DIM + dim + col);
        tile_put8(tile, row, col, v);
    }
}

// One simdgroup's rows of an online softmax step: scores of 64 tokens from `first` on become probabilities in p.
template <uint GROUP, uint SIMDS>
inline void softmax_rows(threadgroup const float* scores, threadgroup act_t* p, threadgroup float* most,
                         threadgroup float* sum, threadgroup float* shrink, uint base, uint live, uint position,
                         uint first, uint lane, uint simd) {
    for (uint r = simd; r < live; r += SIMDS) {
        const uint limit = position + (base + r) / GROUP;
        float high = most[r];
        for (uint j = lane; j < TILE_K; j += SIMD_WIDTH)
            if (first + j <= limit) high = max(high, scores[r * TILE_K + j]);
        high = simd_max(high);
        float e[TILE_K / SIMD_WIDTH];
        for (uint i = 0; i < TILE_K / SIMD_WIDTH; i++) {
            const uint j = i * SIMD_WIDTH + lane;
            const float v = precise::exp(scores[r * TILE_K + j] - high);
            e[i] = first + j <= limit ? v : 0.0f;
        }
        float total = 0;
        for (uint i = 0; i < TILE_K / SIMD_WIDTH; i++) {
            total += e[i];
            p[tile_at(r, i * SIMD_WIDTH + lane)] = act_t(e[i]);
        }
        total = simd_sum(total);
        if (lane == 0) {
            shrink[r] = precise::exp(most[r] - high);
            sum[r] = fma(sum[r], shrink[r], total);
            most[r] = high;
        }
    }
}

// o = shrink * o + p v, for 64 dims of v from `dim` on. Ends with a barrier.
template <uint BM, uint SIMDS>
inline void add_values(thread tile_acc<BM, TILE_K, SIMDS, true>& o, threadgroup act_t* p, threadgroup act_t* right,
                       threadgroup const float* shrink, device const bfloat* v_cache, device const uint* table,
                       uint kv_heads, uint kv_head, uint dim, uint first, uint end, uint live, uint tid) {
    stage_cache<SIMDS * SIMD_WIDTH>(right, v_cache, table, kv_heads, kv_head, dim, first, end, tid);
    UNROLL_TILE
    for (uint i = 0; i < tile_capacity(o); i++)
        if (tile_valid(o, i)) o[i] *= shrink[tile_row(o, i)];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_multiply_plain<BM, TILE_K, SIMDS>(o, p, right, live);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Divides by the softmax's sum, gates, and writes 64 dims from `dim` on of the tile's live (row, head) pairs.
template <uint GROUP, class Acc>
inline void write_values(thread Acc& o, threadgroup const float* sum, device const float* proj, device act_t* y,
                         uint proj_dim, uint heads, uint head, uint dim, uint base, uint live) {
    UNROLL_TILE
    for (uint i = 0; i < tile_capacity(o); i++) {
        const uint r = tile_row(o, i), d = dim + tile_col(o, i);
        if (!tile_valid(o, i) || r >= live) continue;
        const uint row = (base + r) / GROUP, h = head + (base + r) % GROUP;
        const float gate = proj[row * proj_dim + (h * 2 + 1) * HEAD_DIM + d];
        y[(row * heads + h) * HEAD_DIM + d] = to_act(o[i] / sum[r] * sigmoid(gate));
    }
}

// (row, query head) pairs of a tile. A CPU has room for more, and reads the cache less often.
constant constexpr uint PAIRS = SIMD_WIDTH == 1 ? 128 : 32;

// attention_tile: one threadgroup makes PAIRS (row, query head) pairs of one KV head.
//   grid: (kv_heads, (rows * GROUP + PAIRS - 1) / PAIRS, 1)
//   const: GROUP <= 8
//   used: encode_attention_rows
template <uint GROUP>
KERNEL(attention_tile, 4)(
    device const act_t*           q          [[buffer(0)]],  // [kv_heads, rows, GROUP, HEAD_DIM]
    device const float*           proj       [[buffer(1)]],  // [rows, proj_dim]
    device const bfloat*          k_cache    [[buffer(2)]],  // [pages, PAGE, kv_heads, HEAD_DIM]
    device const bfloat*          v_cache    [[buffer(3)]],  // [pages, PAGE, kv_heads, HEAD_DIM]
    device const uint*            page_table [[buffer(4)]],  // [sessions, session_pages]
    device const StepState*       step       [[buffer(5)]],  // [1]
    device act_t*                 y          [[buffer(6)]],  // [rows, kv_heads, GROUP, HEAD_DIM]
    constant attention_tile_args& args       [[buffer(7)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(4), THREADS = SIMDS * SIMD_WIDTH;
    SHARED act_t left[PAIRS * TILE_K];    // 64 dims of q, then the probabilities
    SHARED act_t right[TILE_K * TILE_K];  // 64 dims of k, then of v
    SHARED float scores[PAIRS * TILE_K];
    SHARED float most[PAIRS];
    SHARED float sum[PAIRS];
    SHARED float shrink[PAIRS];
    inputs_ready();
    const uint kv_head = group.x, base = group.y * PAIRS, kv_heads = args.kv_heads;
    if (base >= step->rows * GROUP) return;
    const uint live = min(PAIRS, step->rows * GROUP - base), position = step->position;
    const uint end = position + (base + live - 1) / GROUP + 1;
    device const uint* table = page_table + step->session * args.session_pages;
    device const act_t* queries = q + (kv_head * args.rows * GROUP + base) * HEAD_DIM;
    for (uint r = tid; r < PAIRS; r += THREADS) {
        most[r] = -INFINITY;
        sum[r] = 0;
        shrink[r] = 0;  // of rows past the end, which take part as zeros
    }
    tile_acc<PAIRS, TILE_K, SIMDS, true> o0, o1, o2, o3;  // dims 0, 64, 128, 192 and on
    tile_clear(o0, lane, simd);
    tile_clear(o1, lane, simd);
    tile_clear(o2, lane, simd);
    tile_clear(o3, lane, simd);
    for (uint first = 0; first < end; first += TILE_K) {
        tile_acc<PAIRS, TILE_K, SIMDS> score;
        tile_clear(score, lane, simd);
        for (uint dim = 0; dim < HEAD_DIM; dim += TILE_K) {
            stage_rows<PAIRS, THREADS>(left, queries + dim, own_rows(), HEAD_DIM, live, tid);
            stage_cache<THREADS>(right, k_cache, table, kv_heads, kv_head, dim, first, end, tid);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            tile_multiply<PAIRS, TILE_K, SIMDS>(score, left, right, live, TILE_K);
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        UNROLL_TILE
        for (uint i = 0; i < tile_capacity(score); i++)
            if (tile_valid(score, i)) scores[tile_row(score, i) * TILE_K + tile_col(score, i)] = score[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        softmax_rows<GROUP, SIMDS>(scores, left, most, sum, shrink, base, live, position, first, lane, simd);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        add_values<PAIRS, SIMDS>(o0, left, right, shrink, v_cache, table, kv_heads, kv_head, 0, first, end, live,
                                 tid);
        add_values<PAIRS, SIMDS>(o1, left, right, shrink, v_cache, table, kv_heads, kv_head, 64, first, end, live,
                                 tid);
        add_values<PAIRS, SIMDS>(o2, left, right, shrink, v_cache, table, kv_heads, kv_head, 128, first, end, live,
                                 tid);
        add_values<PAIRS, SIMDS>(o3, left, right, shrink, v_cache, table, kv_heads, kv_head, 192, first, end, live,
                                 tid);
    }
    const uint heads = kv_heads * GROUP, head = kv_head * GROUP;
    write_values<GROUP>(o0, sum, proj, y, args.proj_dim, heads, head, 0, base, live);
    write_values<GROUP>(o1, sum, proj, y, args.proj_dim, heads, head, 64, base, live);
    write_values<GROUP>(o2, sum, proj, y, args.proj_dim, heads, head, 128, base, live);
    write_values<GROUP>(o3, sum, proj, y, args.proj_dim, heads, head, 192, base, live);
    outputs_follow();
}
