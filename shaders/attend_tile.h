// attend_tile.h -- attention of many rows: the (row, query head) pairs of one KV head that a threadgroup makes.
#pragma once
#include "tile.h"

// Pairs of a matrix tile, and of a threadgroup. A CPU has room for more, and reads the cache less often.
constant constexpr uint ATTEND_ROWS = SIMD_WIDTH == 1 ? 128 : 32;
#ifndef LILY_SHAPES
constant constexpr uint PAIRS = ATTEND_ROWS;
#endif

// What a threadgroup's pairs have in common. q begins at the KV head's first pair, table is the session's.
struct attend_job {
    device const act_t* q;
    device const float* proj;
    device const bfloat* k_cache;
    device const bfloat* v_cache;
    device const uint* table;
    device act_t* y;
    uint kv_heads;
    uint kv_head;
    uint proj_dim;
    uint position;  // of row 0
};

#ifdef LILY_ATTEND_HEADER
#include LILY_ATTEND_HEADER
#endif

#ifndef LILY_TUNED_PAIRS
// Stages 64 dims of TILE_K cache rows from token `first` on as act_t; tokens from `end` on become zero.
template <uint THREADS>
inline void stage_cache(threadgroup act_t* tile, device const bfloat* cache, const thread attend_job& job, uint dim,
                        uint first, uint end, uint tid) {
    for (uint t = tid; t < TILE_K * (TILE_K / 8); t += THREADS) {
        const uint row = t / (TILE_K / 8), col = t % (TILE_K / 8) * 8, token = first + row;
        uint4 v = uint4(0u);
        if (token < end)
            v = acts8(cache + (cache_row(job.table, token) * job.kv_heads + job.kv_head) * HEAD_DIM + dim + col);
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
                       threadgroup const float* shrink, const thread attend_job& job, uint dim, uint first, uint end,
                       uint live, uint tid) {
    stage_cache<SIMDS * SIMD_WIDTH>(right, job.v_cache, job, dim, first, end, tid);
    UNROLL_TILE
    for (uint i = 0; i < tile_capacity(o); i++)
        if (tile_valid(o, i)) o[i] *= shrink[tile_row(o, i)];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_multiply_plain<BM, TILE_K, SIMDS>(o, p, right, live);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Divides by the softmax's sum, gates, and writes 64 dims from `dim` on of the tile's live (row, head) pairs.
template <uint GROUP, class Acc>
inline void write_values(thread Acc& o, threadgroup const float* sum, const thread attend_job& job, uint dim, uint base,
                         uint live) {
    const uint heads = job.kv_heads * GROUP, head = job.kv_head * GROUP;
    UNROLL_TILE
    for (uint i = 0; i < tile_capacity(o); i++) {
        const uint r = tile_row(o, i), d = dim + tile_col(o, i);
        if (!tile_valid(o, i) || r >= live) continue;
        const uint row = (base + r) / GROUP, h = head + (base + r) % GROUP;
        const float gate = job.proj[row * job.proj_dim + (h * 2 + 1) * HEAD_DIM + d];
        job.y[(row * heads + h) * HEAD_DIM + d] = to_act(o[i] / sum[r] * sigmoid(gate));
    }
}

// ATTEND_ROWS pairs, of which `live` exist, from pair `base` on. stats: maxima, sums and factors of the softmax.
template <uint GROUP, uint SIMDS>
inline void attend_rows(const thread attend_job& job, uint base, uint live, threadgroup act_t* left,
                        threadgroup act_t* right, threadgroup float* scores, threadgroup float* stats, uint tid,
                        uint lane, uint simd) {
    constexpr uint THREADS = SIMDS * SIMD_WIDTH;
    threadgroup float* most = stats;
    threadgroup float* sum = stats + ATTEND_ROWS;
    threadgroup float* shrink = stats + 2 * ATTEND_ROWS;
    device const act_t* queries = job.q + base * HEAD_DIM;
    const uint end = job.position + (base + live - 1) / GROUP + 1;
    for (uint r = tid; r < ATTEND_ROWS; r += THREADS) {
        most[r] = -INFINITY;
        sum[r] = 0;
        shrink[r] = 0;  // of rows past the end, which take part as zeros
    }
    tile_acc<ATTEND_ROWS, TILE_K, SIMDS, true> o0, o1, o2, o3;  // dims 0, 64, 128, 192 and on
    tile_clear(o0, lane, simd);
    tile_clear(o1, lane, simd);
    tile_clear(o2, lane, simd);
    tile_clear(o3, lane, simd);
    for (uint first = 0; first < end; first += TILE_K) {
        tile_acc<ATTEND_ROWS, TILE_K, SIMDS> score;
        tile_clear(score, lane, simd);
        for (uint dim = 0; dim < HEAD_DIM; dim += TILE_K) {
            stage_rows<ATTEND_ROWS, THREADS>(left, queries + dim, own_rows(), HEAD_DIM, live, tid);
            stage_cache<THREADS>(right, job.k_cache, job, dim, first, end, tid);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            tile_multiply<ATTEND_ROWS, TILE_K, SIMDS>(score, left, right, live, TILE_K);
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        UNROLL_TILE
        for (uint i = 0; i < tile_capacity(score); i++)
            if (tile_valid(score, i)) scores[tile_row(score, i) * TILE_K + tile_col(score, i)] = score[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        softmax_rows<GROUP, SIMDS>(scores, left, most, sum, shrink, base, live, job.position, first, lane, simd);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        add_values<ATTEND_ROWS, SIMDS>(o0, left, right, shrink, job, 0, first, end, live, tid);
        add_values<ATTEND_ROWS, SIMDS>(o1, left, right, shrink, job, 64, first, end, live, tid);
        add_values<ATTEND_ROWS, SIMDS>(o2, left, right, shrink, job, 128, first, end, live, tid);
        add_values<ATTEND_ROWS, SIMDS>(o3, left, right, shrink, job, 192, first, end, live, tid);
    }
    write_values<GROUP>(o0, sum, job, 0, base, live);
    write_values<GROUP>(o1, sum, job, 64, base, live);
    write_values<GROUP>(o2, sum, job, 128, base, live);
    write_values<GROUP>(o3, sum, job, 192, base, live);
}

// `live` <= PAIRS pairs from pair `base` on. left, right, scores and stats have room for one tile of pairs.
template <uint GROUP, uint SIMDS>
inline void attend_pairs(const thread attend_job& job, uint base, uint live, threadgroup act_t* left,
                         threadgroup act_t* right, threadgroup float* scores, threadgroup float* stats, uint tid,
                         uint lane, uint simd) {
    for (uint done = 0; done < live; done += ATTEND_ROWS) {
        if (done > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
        attend_rows<GROUP, SIMDS>(job, base + done, min(ATTEND_ROWS, live - done), left, right, scores, stats, tid,
                                  lane, simd);
    }
}
#endif
