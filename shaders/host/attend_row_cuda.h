// Tuned body of attend_row for NVIDIA GPUs: scores and sums by tensor cores, for eight heads at once. A warp takes 16
// tokens at a time, whose keys and values come to threadgroup memory by themselves while others are at work.
//
// Keys and values stay as they are in the cache. Queries and probabilities have more digits than bfloat: of a product's
// rows, the upper eight have them rounded, the lower eight what that lost; probabilities take two products.
#pragma once

#define LILY_TUNED_ATTEND_ROW

constexpr uint ROW_TOKENS = 16;                                  // of a tile
constexpr uint ROW_CHUNKS = HEAD_DIM / 8;                        // of 16 bytes, of a row
constexpr uint ROW_TILE = ROW_TOKENS * ROW_CHUNKS;
constexpr uint HEAD_ROWS = 8;                                    // heads of a product

// Threadgroup memory of a launch: see WIDE_KERNELS.
struct attend_row_memory {
    uint4 query[2][HEAD_ROWS * ROW_CHUNKS];  // rounded, and the rest
    uint4 tile[ATTEND_SIMDS][2][ROW_TILE];   // keys, values; in the end a simdgroup's sums
    float stats[ATTEND_SIMDS][HEAD_ROWS][2];
};
static_assert(sizeof(attend_row_memory) <= WIDE_KERNELS[1].bytes, "as the host asks for");
static_assert(sizeof(float) * HEAD_ROWS * HEAD_DIM <= 2 * ROW_TILE * sizeof(uint4), "sums have room in the tiles");

LILY_INLINE void mma_bfloat(float* d, const uint* a, uint b0, uint b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two values rounded to bfloat, the first in the lower bits; leaves what that lost.
LILY_INLINE uint take_bfloats(float& low, float& high) {
    uint r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    low -= as_type<float>(r << 16);
    high -= as_type<float>(r & 0xffff0000u);
    return r;
}

// Where a row's chunks are: what eight lanes read at once is in as many banks, of two rows of keys or four of values.
LILY_INLINE uint key_place(uint row, uint chunk) {
    return row * ROW_CHUNKS + (chunk ^ row % 2 * 4);
}
LILY_INLINE uint value_place(uint row, uint chunk) {
    return row * ROW_CHUNKS + (chunk ^ (row & 6));
}

template <uint GROUP, uint SIMDS>
struct attend_row {
    static_assert(GROUP <= HEAD_ROWS && SIMDS == ATTEND_SIMDS);
    bool begun;
    LILY_INLINE static attend_row_memory& memory() {
        return *reinterpret_cast<attend_row_memory*>(launch_memory());
    }
    LILY_INLINE static void fetch(const attend_span& span, uint first, bool values, uint lane, uint simd) {
        uint4* to = memory().tile[simd][values ? 1 : 0];
        const bfloat* from = values ? span.v_cache : span.k_cache;
        const uint row = cache_row(span.table, first);  // a tile lies in one page
        UNROLL for (uint t = 0; t < ROW_TOKENS; t++)
            copy_async_or_zero(to + (values ? value_place(t, lane) : key_place(t, lane)),
                               from + ((row + t) * span.kv_heads + span.kv_head) * HEAD_DIM + lane * 8,
                               first + t < span.last);
        copy_async_end();
    }
    LILY_INLINE void begin(const attend_span& span, uint own, uint lane, uint simd) {
        static_assert(ROW_CHUNKS == SIMD_WIDTH, "a lane copies a chunk of each row");
        const uint first = span.first + simd * ROW_TOKENS;
        begun = first < span.last && first + ROW_TOKENS <= own;
        if (!begun) return;
        fetch(span, first, false, lane, simd);
        fetch(span, first, true, lane, simd);
    }

    // Queries as factors of products; rows that are no heads are zero.
    LILY_INLINE static void put_queries(const act_t* q, uint tid) {
        attend_row_memory& m = memory();
        for (uint i = tid; i < HEAD_ROWS * ROW_CHUNKS; i += SIMDS * SIMD_WIDTH) {
            const uint row = i / ROW_CHUNKS, at = key_place(row, i % ROW_CHUNKS);
            uint4 high = uint4(0u), rest = uint4(0u);
            UNROLL for (uint c = 0; c < 4; c++) {
                if (row >= GROUP) break;
                float a = float(q[i * 8 + 2 * c]), b = float(q[i * 8 + 2 * c + 1]);
                high[c] = take_bfloats(a, b);
                rest[c] = take_bfloats(a, b);
            }
            m.query[0][at] = high;
            m.query[1][at] = rest;
        }
    }

    // s[2 n + i] is head lane / 4's score of token 8 n + lane % 4 * 2 + i; -inf from `live` on.
    LILY_INLINE static void scores(float* s, const uint4* keys, uint live, uint lane) {
        const attend_row_memory& m = memory();
        float sum[2][2] = {};
        _Pragma("unroll 2") for (uint i = 0; i < ROW_CHUNKS / 4; i++) {  // sums take most registers
            const uint chunk = i * 4 + lane % 4;
            const uint4 high = m.query[0][key_place(lane / 4, chunk)], rest = m.query[1][key_place(lane / 4, chunk)];
            UNROLL for (uint n = 0; n < 2; n++) {
                const uint4 k = keys[key_place(n * 8 + lane / 4, chunk)];
                const uint first[4] = {high.x, rest.x, high.y, rest.y}, second[4] = {high.z, rest.z, high.w, rest.w};
                float d[4] = {};  // added up here, because products cut off what does not fit
                mma_bfloat(d, first, k.x, k.y);
                mma_bfloat(d, second, k.z, k.w);
                UNROLL for (uint c = 0; c < 2; c++) sum[n][c] += d[c] + d[2 + c];
            }
        }
        UNROLL for (uint j = 0; j < 4; j++)
            s[j] = j / 2 * 8 + lane % 4 * 2 + j % 2 < live ? sum[j / 2][j % 2] : -INFINITY;
    }

    // o[8 i + 2 w + c]: the sums of dim 2 w + c of chunks 8 i + lane % 4 * 2 and the next one, as products have them.
    LILY_INLINE static void add(float (*o)[4], const float* p, const uint4* values, uint lane) {
        uint a[4], last[4] = {};
        UNROLL for (uint n = 0; n < 2; n++) {
            float low = p[2 * n], high = p[2 * n + 1];
            a[2 * n] = take_bfloats(low, high);
            a[2 * n + 1] = take_bfloats(low, high);
            last[2 * n] = take_bfloats(low, high);
        }
        UNROLL for (uint i = 0; i < ROW_CHUNKS / 8; i++) {
            uint4 v[4];
            UNROLL for (uint t = 0; t < 4; t++)
                v[t] = values[value_place(t / 2 * 8 + lane % 4 * 2 + t % 2, i * 8 + lane / 4)];
            UNROLL for (uint w = 0; w < 4; w++)
                UNROLL for (uint c = 0; c < 2; c++) {
                    const uint halves = c == 0 ? 0x5410 : 0x7632;
                    const uint b0 = __byte_perm(v[0][w], v[1][w], halves), b1 = __byte_perm(v[2][w], v[3][w], halves);
                    mma_bfloat(o[i * 8 + 2 * w + c], a, b0, b1);
                    mma_bfloat(o[i * 8 + 2 * w + c], last, b0, b1);
                }
        }
    }

    // Scores become probabilities; what has been summed is scaled to their maximum.
    LILY_INLINE static void soften(float* s, float (*o)[4], float& most, float& sum) {
        const float high = max(most, quad_max(max(max(s[0], s[1]), max(s[2], s[3]))));
        const float shrink = precise::exp(most - high);
        most = high;
        UNROLL for (uint j = 0; j < 4; j++) s[j] = precise::exp(s[j] - high);
        sum = fma(sum, shrink, (s[0] + s[1]) + (s[2] + s[3]));
        // Mostly no maximum grows; a factor of one changes nothing.
        if (__any_sync(ALL_LANES, shrink != 1.0f))
            UNROLL for (uint i = 0; i < HEAD_DIM / 2; i++) o[i / 4][i % 4] *= shrink;
    }

    template <class O, class S>
    LILY_INLINE void finish(const attend_span& span, const act_t* q, O out, S stats, float*, float*, uint tid,
                            uint lane, uint simd) {
        attend_row_memory& m = memory();
        put_queries(q, tid);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float o[HEAD_DIM / 8][4];
        UNROLL for (uint i = 0; i < HEAD_DIM / 2; i++) o[i / 4][i % 4] = 0;
        float most = -INFINITY, sum = 0;
        constexpr uint TURN = SIMDS * ROW_TOKENS;
        uint first = span.first + simd * ROW_TOKENS;
        if (!begun && first < span.last) {
            fetch(span, first, false, lane, simd);
            fetch(span, first, true, lane, simd);
        }
        for (; first < span.last; first += TURN) {
            const bool more = first + TURN < span.last;
            float s[4];
            copy_async_wait<1>();
            __syncwarp();
            scores(s, m.tile[simd][0], span.last - first, lane);
            __syncwarp();
            if (more) fetch(span, first + TURN, false, lane, simd);
            soften(s, o, most, sum);
            if (more)
                copy_async_wait<1>();
            else
                copy_async_wait<0>();
            __syncwarp();
            add(o, s, m.tile[simd][1], lane);
            __syncwarp();
            if (more) fetch(span, first + TURN, true, lane, simd);
        }
        sum = quad_sum(sum);
        join(o, most, sum, out, stats, tid, lane, simd);
    }

    template <class O, class S>
    LILY_INLINE static void join(const float (*o)[4], float most, float sum, O out, S stats, uint tid, uint lane,
                                 uint simd) {
        attend_row_memory& m = memory();
        const uint head = lane / 4;
        if (lane % 4 == 0) {
            m.stats[simd][head][0] = most;
            m.stats[simd][head][1] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float all = -INFINITY;
        UNROLL for (uint s = 0; s < SIMDS; s++) all = max(all, m.stats[s][head][0]);
        const float weight = precise::exp(most - all);
        float* sums = reinterpret_cast<float*>(m.tile[simd]);
        UNROLL for (uint i = 0; i < HEAD_DIM / 4; i++) {
            const uint j = i / 2, c = i % 2;  // product, chunk
            const uint dim = (j / 8 * 8 + lane % 4 * 2 + c) * 8 + j % 8;
            sums[head * HEAD_DIM + dim] = (o[j][c] + o[j][2 + c]) * weight;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = tid; i < GROUP * HEAD_DIM; i += SIMDS * SIMD_WIDTH) {
            float total = 0;
            UNROLL for (uint s = 0; s < SIMDS; s++) total += reinterpret_cast<const float*>(m.tile[s])[i];
            out[i] = total;
        }
        for (uint h = tid; h < GROUP; h += SIMDS * SIMD_WIDTH) {
            float high = -INFINITY, total = 0;
            UNROLL for (uint s = 0; s < SIMDS; s++) high = max(high, m.stats[s][h][0]);
            UNROLL for (uint s = 0; s < SIMDS; s++)
                total = fma(m.stats[s][h][1], precise::exp(m.stats[s][h][0] - high), total);
            stats[h * 2] = high;
            stats[h * 2 + 1] = total;
        }
    }
};
