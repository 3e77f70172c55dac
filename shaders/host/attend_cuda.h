// Tuned body of attend_pairs for NVIDIA GPUs with warpgroup instructions: a warpgroup has 64 of a threadgroup's pairs,
// its scores, probabilities and outputs in registers. Keys and values come as they are in the cache to memory of the
// thread that asked for them, while the tile before is at work, and become act_t in the tiles that all share.
#pragma once

#if LILY_WARPGROUP
#define LILY_TUNED_PAIRS

constexpr uint HEAD_TILES = HEAD_DIM / TILE_K;                    // of 64 dims
constexpr uint CACHE_PIECES = TILE_K * HEAD_DIM / 8;              // of 16 bytes, in 64 tokens
constexpr uint ATTEND_THREADS = 2 * 128, OWN_PIECES = CACHE_PIECES / ATTEND_THREADS;
constexpr float LOG2_E = 1.44269504f;

// Threadgroup memory of a launch: see WIDE_KERNELS.
struct attend_memory {
    act_t q[HEAD_TILES][PAIRS * TILE_K];
    act_t k[HEAD_TILES][TILE_K * TILE_K];
    act_t v[HEAD_TILES][TILE_K * TILE_K];
    uint4 next_k[OWN_PIECES][ATTEND_THREADS];
    uint4 next_v[OWN_PIECES][ATTEND_THREADS];
};
static_assert(sizeof(attend_memory) == WIDE_KERNELS[0].bytes, "as the host asks for");

LILY_INLINE float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Piece `tid + i * ATTEND_THREADS` of a tile's: its token and its dims.
LILY_INLINE uint piece_token(uint i, uint tid) {
    return (tid + i * ATTEND_THREADS) / (HEAD_DIM / 8);
}
LILY_INLINE uint piece_dim(uint tid) {
    return tid % (HEAD_DIM / 8) * 8;
}

LILY_INLINE void fetch_cache(attend_memory& m, const attend_job& job, uint first, uint tid) {
    const uint row = cache_row(job.table, first);  // a tile lies in one page
    UNROLL for (uint i = 0; i < OWN_PIECES; i++) {
        const uint at = ((row + piece_token(i, tid)) * job.kv_heads + job.kv_head) * HEAD_DIM + piece_dim(tid);
        copy_async(&m.next_k[i][tid], job.k_cache + at);
        copy_async(&m.next_v[i][tid], job.v_cache + at);
    }
    copy_async_end();
}

LILY_INLINE uint4 acts_of_cache(uint4 v) {
    constexpr uint MOST = 0x477f477f, LEAST = 0xc77fc77f;
    uint4 r;
    UNROLL for (uint i = 0; i < 4; i++) {
        // Saturated among what bfloat has, of which this is the last that half has too.
        uint both;
        asm("{min.NaN.bf16x2 %0, %1, %2; max.NaN.bf16x2 %0, %0, %3;}" : "=&r"(both) : "r"(v[i]), "r"(MOST), "r"(LEAST));
        r[i] = pack2(as_type<float>(both << 16), as_type<float>(both & 0xffff0000u));
    }
    return r;
}

// What was fetched for the tokens from `first` on, to the tiles; zeros from token `end` on.
LILY_INLINE void put_cache(attend_memory& m, uint first, uint end, uint tid) {
    UNROLL for (uint i = 0; i < OWN_PIECES; i++) {
        const uint token = piece_token(i, tid), dim = piece_dim(tid);
        const bool live = first + token < end;
        tile_put8(m.k[dim / TILE_K], token, dim % TILE_K, live ? acts_of_cache(m.next_k[i][tid]) : uint4(0u));
        tile_put8(m.v[dim / TILE_K], token, dim % TILE_K, live ? acts_of_cache(m.next_v[i][tid]) : uint4(0u));
    }
}

// The softmax of a thread's two rows, g and g + 8 of its warp; four threads share each.
struct attend_state {
    float most[2], sum[2];
    uint limit[2];  // last token that a row sees
};

// Scores of 64 tokens from `first` on become probabilities; o is scaled to their maximum.
LILY_INLINE void soften(attend_state& state, float* score, float* o, uint first) {
    const uint column = threadIdx.x % 4 * 2;
    float shrink[2];
    UNROLL for (uint r = 0; r < 2; r++) {
        if (first + TILE_K - 1 > state.limit[r])
            UNROLL for (uint i = 0; i < 16; i++)
                if (first + i / 2 * 8 + column + i % 2 > state.limit[r]) score[i / 2 * 4 + r * 2 + i % 2] = -INFINITY;
        float high = state.most[r];
        UNROLL for (uint i = 0; i < 16; i++) high = max(high, score[i / 2 * 4 + r * 2 + i % 2]);
        high = quad_max(high);
        shrink[r] = exp2_fast((state.most[r] - high) * LOG2_E);
        float total = 0;
        UNROLL for (uint i = 0; i < 16; i++) {
            float& e = score[i / 2 * 4 + r * 2 + i % 2];
            e = exp2_fast((e - high) * LOG2_E);
            total += e;
        }
        state.sum[r] = fma(state.sum[r], shrink[r], total);
        state.most[r] = high;
    }
    // Mostly no maximum grows; a factor of one changes nothing.
    if (__any_sync(ALL_LANES, shrink[0] != 1.0f || shrink[1] != 1.0f))
        UNROLL for (uint i = 0; i < HEAD_DIM / 2; i++) o[i] *= shrink[i / 2 % 2];
}

template <uint GROUP>
LILY_INLINE void write_pairs(const attend_job& job, const attend_state& state, const float* o, uint base, uint live,
                             uint row0) {
    const uint heads = job.kv_heads * GROUP, column = threadIdx.x % 4 * 2;
    UNROLL for (uint r = 0; r < 2; r++) {
        const uint pair = base + row0 + r * 8, row = pair / GROUP, head = job.kv_head * GROUP + pair % GROUP;
        const float scale = 1.0f / quad_sum(state.sum[r]);
        if (row0 + r * 8 >= live) continue;
        const float* gates = job.proj + row * job.proj_dim + (head * 2 + 1) * HEAD_DIM + column;
        act_t* y = job.y + (row * heads + head) * HEAD_DIM + column;
        UNROLL for (uint i = 0; i < HEAD_DIM / 8; i++) {
            const float2 gate = *reinterpret_cast<const float2*>(gates + i * 8);
            const float a = o[i * 4 + r * 2] * scale * sigmoid(gate.x);
            const float b = o[i * 4 + r * 2 + 1] * scale * sigmoid(gate.y);
            *reinterpret_cast<uint*>(y + i * 8) = pack2_acts(a, b);
        }
    }
}

template <uint GROUP, uint SIMDS>
LILY_INLINE void attend_pairs(const attend_job& job, uint base, uint live, act_t*, act_t*, float*, float*, uint tid,
                              uint lane, uint simd) {
    attend_memory& m = *reinterpret_cast<attend_memory*>(launch_memory());
    const uint end = job.position + (base + live - 1) / GROUP + 1;
    fetch_cache(m, job, 0, tid);
    for (uint i = tid; i < PAIRS * (HEAD_DIM / 8); i += ATTEND_THREADS) {
        const uint row = i / (HEAD_DIM / 8), dim = i % (HEAD_DIM / 8) * 8;
        const act_t* from = job.q + (base + row) * HEAD_DIM + dim;
        tile_put8(m.q[dim / TILE_K], row, dim % TILE_K, row < live ? *reinterpret_cast<const uint4*>(from) : uint4(0u));
    }
    const uint row0 = simd * MMA_ROWS + lane / 4;
    attend_state state;
    UNROLL for (uint r = 0; r < 2; r++) {
        state.most[r] = -INFINITY;
        state.sum[r] = 0;
        state.limit[r] = job.position + (base + row0 + r * 8) / GROUP;
    }
    float o[HEAD_DIM / 2];
    UNROLL for (uint i = 0; i < HEAD_DIM / 2; i++) o[i] = 0;
    for (uint first = 0; first < end; first += TILE_K) {
        copy_async_wait<0>();
        put_cache(m, first, end, tid);
        if (first + TILE_K < end) fetch_cache(m, job, first + TILE_K, tid);
        publish_tile();
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float score[32];
        UNROLL for (uint i = 0; i < 32; i++) score[i] = 0;
        settle<32>(score);
        warpgroup_begin();
        UNROLL for (uint d = 0; d < HEAD_TILES; d++)
            UNROLL for (uint s = 0; s < 4; s++)
                warpgroup_mma_tiles(score, tile_descriptor(m.q[d] + simd / 4 * 64 * TILE_K) + 2 * s,
                                    tile_descriptor(m.k[d]) + 2 * s);
        warpgroup_end();
        warpgroup_finish(score);
        soften(state, score, o, first);
        uint p[4][4];
        UNROLL for (uint s = 0; s < 4; s++)
            UNROLL for (uint i = 0; i < 4; i++) p[s][i] = pack2(score[8 * s + 2 * i], score[8 * s + 2 * i + 1]);
        settle(p);
        settle<HEAD_DIM / 2>(o);
        warpgroup_begin();
        UNROLL for (uint s = 0; s < 4; s++)
            UNROLL for (uint d = 0; d < HEAD_TILES; d++)
                warpgroup_mma_plain(o + d * 32, p[s], tile_descriptor(m.v[d] + s * 16 * TILE_K));
        warpgroup_end();
        warpgroup_finish(o);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    write_pairs<GROUP>(job, state, o, base, live, row0);
}
#endif
