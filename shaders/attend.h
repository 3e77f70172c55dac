// attend.h -- decode attention of one row over a span of the cache, for a threadgroup.
#pragma once
#include "rope.h"

constant constexpr uint LANE_DIMS = HEAD_DIM / SIMD_WIDTH;
#ifndef LILY_SHAPES
constant constexpr uint ATTEND_SIMDS = 8;
#endif
constexpr uint attend_simds() { return simdgroups(ATTEND_SIMDS); }  // of a threadgroup

// Makes q of a KV head's query heads from the projection and, in the threadgroup that `writes` them, the row's k and v.
template <uint GROUP, uint SIMDS>
inline void attend_prepare(device const float* proj, device const bfloat* q_norm, device const bfloat* k_norm,
                           device const float* inv_freq, uint position, uint kv_heads, uint kv_head, float eps,
                           bool writes, device bfloat* k, device bfloat* v, threadgroup float* turn,
                           threadgroup act_t* q, uint tid, uint lane, uint simd) {
    make_turn(turn, inv_freq, position, tid, SIMDS * SIMD_WIDTH);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    device const float* queries = proj + kv_head * GROUP * 2 * HEAD_DIM;
    device const float* key = proj + (2 * kv_heads * GROUP + kv_head) * HEAD_DIM;
    device const float* value = key + kv_heads * HEAD_DIM;
    for (uint part = simd; part < GROUP + (writes ? 2 : 0); part += SIMDS) {
        float x[HEAD_PARTS];
        if (part < GROUP) {
            make_head(x, queries + part * 2 * HEAD_DIM, q_norm, turn, eps, lane);
            for (uint j = 0; j < HEAD_PARTS; j++) x[j] *= QUERY_SCALE;
            store_acts(q + part * HEAD_DIM + lane, SIMD_WIDTH, x, 1, HEAD_PARTS);
        } else if (part == GROUP) {
            make_head(x, key, k_norm, turn, eps, lane);
            for (uint j = 0; j < HEAD_PARTS; j++) k[j * SIMD_WIDTH + lane] = bfloat(x[j]);
        } else {
            for (uint i = lane; i < HEAD_DIM; i += SIMD_WIDTH) v[i] = bfloat(value[i]);
        }
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
}

// Tokens [first, last) of one KV head of a session.
struct attend_span {
    device const bfloat* k_cache;
    device const bfloat* v_cache;
    device const uint* table;
    uint kv_heads;
    uint kv_head;
    uint first;
    uint last;
};

#ifdef LILY_ATTEND_ROW_HEADER
#include LILY_ATTEND_ROW_HEADER
#endif

#ifndef LILY_TUNED_ATTEND_ROW
constant constexpr uint RUN = SIMD_WIDTH == 1 ? 16 : 1;  // tokens that a simdgroup attends to at a time
static_assert(PAGE % RUN == 0 && KV_BLOCK % RUN == 0, "a run lies in one page");

#ifndef LILY_TUNED_ROWS
// One lane's dims of up to RUN rows of K or V, `stride` elements apart.
template <uint DIMS> struct lane_rows {
    float x[RUN][DIMS];
    void load(device const bfloat* from, uint stride, uint count) thread {
        for (uint t = 0; t < count; t++)
            for (uint i = 0; i < DIMS; i++) x[t][i] = float(from[t * stride + i]);
    }
};

// p[t][h] = sum_i q[h][i] k[t][i]
template <uint GROUP, uint DIMS>
inline void rows_dot(thread float (&p)[RUN][GROUP], const thread float (&q)[GROUP][DIMS],
                     const thread lane_rows<DIMS>& k, uint count) {
    for (uint t = 0; t < count; t++)
        for (uint h = 0; h < GROUP; h++) p[t][h] = lane_dot<DIMS>(q[h], k.x[t]);
}

// o[h][i] += sum_t p[t][h] v[t][i]
template <uint GROUP, uint DIMS>
inline void rows_add(thread float (&o)[GROUP][DIMS], const thread float (&p)[RUN][GROUP],
                     const thread lane_rows<DIMS>& v, uint count) {
    for (uint t = 0; t < count; t++)
        for (uint h = 0; h < GROUP; h++)
            for (uint i = 0; i < DIMS; i++) o[h][i] = fma(p[t][h], v.x[t][i], o[h][i]);
}
#endif

// The running softmax of GROUP query heads, each lane holding LANE_DIMS dims of every head.
template <uint GROUP> struct attend {
    float q[GROUP][LANE_DIMS], o[GROUP][LANE_DIMS], most[GROUP], sum[GROUP];
    void begin(const threadgroup act_t* from, uint lane) thread {
        for (uint h = 0; h < GROUP; h++) {
            most[h] = -INFINITY;
            sum[h] = 0;
            load_acts(q[h], from + h * HEAD_DIM + lane * LANE_DIMS, LANE_DIMS);
            for (uint i = 0; i < LANE_DIMS; i++) o[h][i] = 0;
        }
    }
    // count <= RUN rows of k and v.
    void tokens(device const bfloat* k, device const bfloat* v, uint stride, uint count, uint lane) thread {
        lane_rows<LANE_DIMS> ks, vs;
        ks.load(k + lane * LANE_DIMS, stride, count);
        vs.load(v + lane * LANE_DIMS, stride, count);
        float p[RUN][GROUP] = {}, high[GROUP];
        rows_dot(p, q, ks, count);
        for (uint t = 0; t < count; t++)
            for (uint h = 0; h < GROUP; h++) p[t][h] = simd_sum(p[t][h]);
        for (uint h = 0; h < GROUP; h++) high[h] = most[h];
        for (uint t = 0; t < count; t++)
            for (uint h = 0; h < GROUP; h++) high[h] = max(high[h], p[t][h]);
        for (uint h = 0; h < GROUP; h++) {
            if (high[h] == most[h]) continue;
            const float shrink = precise::exp(most[h] - high[h]);
            most[h] = high[h];
            sum[h] *= shrink;
            for (uint i = 0; i < LANE_DIMS; i++) o[h][i] *= shrink;
        }
        for (uint t = 0; t < count; t++)
            for (uint h = 0; h < GROUP; h++) {
                p[t][h] = precise::exp(p[t][h] - most[h]);
                sum[h] += p[t][h];
            }
        rows_add(o, p, vs, count);
    }
};

// Softmax attention of GROUP query heads to a span.
template <uint GROUP, uint SIMDS> struct attend_row {
    // Tokens before `own` are older than the launch before this one: a device may have them on their way.
    void begin(const thread attend_span&, uint /*own*/, uint /*lane*/, uint /*simd*/) thread {}

    // out: [GROUP, HEAD_DIM], relative to stats: [GROUP, {maximum, sum}]; both device or threadgroup memory. q: [GROUP,
    // HEAD_DIM]. To join simdgroups, part has SIMDS rows of HEAD_DIM, part_stats of two. span.first is a multiple of
    // RUN.
    template <class O, class S>
    void finish(const thread attend_span& span, const threadgroup act_t* q, O out, S stats, threadgroup float* part,
                threadgroup float* part_stats, uint tid, uint lane, uint simd) thread {
        attend<GROUP> a;
        a.begin(q, lane);
        for (uint t = span.first + simd * RUN; t < span.last; t += SIMDS * RUN) {
            const uint at = (cache_row(span.table, t) * span.kv_heads + span.kv_head) * HEAD_DIM;
            a.tokens(span.k_cache + at, span.v_cache + at, span.kv_heads * HEAD_DIM, min(RUN, span.last - t), lane);
        }
        UNROLL_TILE
        for (uint h = 0; h < GROUP; h++) {
            const float2 stat = join(a, h, out + h * HEAD_DIM, part, part_stats, tid, lane, simd);
            if (tid == 0) {
                stats[h * 2] = stat[0];
                stats[h * 2 + 1] = stat[1];
            }
        }
    }

    // Adds up head h over the simdgroups; returns {maximum, sum}.
    template <class O>
    float2 join(const thread attend<GROUP>& a, uint h, O out, threadgroup float* part, threadgroup float* part_stats,
                uint tid, uint lane, uint simd) const thread {
        for (uint i = 0; i < LANE_DIMS; i++) part[simd * HEAD_DIM + lane * LANE_DIMS + i] = a.o[h][i];
        if (lane == 0) {
            part_stats[simd * 2] = a.most[h];
            part_stats[simd * 2 + 1] = a.sum[h];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float most = -INFINITY, sum = 0, weight[SIMDS];
        for (uint s = 0; s < SIMDS; s++) most = max(most, part_stats[s * 2]);
        for (uint s = 0; s < SIMDS; s++) {
            weight[s] = precise::exp(part_stats[s * 2] - most);
            sum = fma(part_stats[s * 2 + 1], weight[s], sum);
        }
        for (uint d = tid; d < HEAD_DIM; d += SIMDS * SIMD_WIDTH) {
            float total = 0;
            for (uint s = 0; s < SIMDS; s++) total = fma(part[s * HEAD_DIM + d], weight[s], total);
            out[d] = total;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        return float2(most, sum);
    }
};
#endif
