// Tuned bodies of the helpers of quant.h for NVIDIA GPUs. Weights become exact integers in half and are multiplied by
// tensor cores, so they are never rounded; a warp multiplies 16 rows of weights by up to MV_X rows of x at once.
#pragma once

#define LILY_TUNED_MANY
#define LILY_TUNED_AHEAD
#define LILY_TUNED_INPUT

// (a & mask) | bits, in one instruction.
LILY_INLINE uint and_or(uint a, uint mask, uint bits) {
    uint r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
    return r;
}
LILY_INLINE uint half2_fma(uint a, uint b, uint c) {
    uint r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
constexpr uint HALF2_1024 = 0x64006400, HALF2_MINUS_1024 = 0xe400e400, HALF2_ONE = 0x3c003c00;
constexpr uint HALF2_SIXTEENTH = 0x2c002c00, HALF2_MINUS_64 = 0xd400d400;

// Two of the weights of a word, as exact integers in half. 4 bits: pair i has weights i and i + 4; 8 bits: 2 i and the
// next.
template <uint BITS>
LILY_INLINE uint weight_pair(uint word, uint i) {
    if (BITS == 8)
        return half2_fma(__byte_perm(word, 0x64646464, i == 0 ? 0x4140 : 0x4342), HALF2_ONE, HALF2_MINUS_1024);
    const uint shifted = i < 2 ? word : word >> 8;
    if (i % 2 == 0) return half2_fma(and_or(shifted, 0x000f000f, HALF2_1024), HALF2_ONE, HALF2_MINUS_1024);
    return half2_fma(and_or(shifted, 0x00f000f0, HALF2_1024), HALF2_SIXTEENTH, HALF2_MINUS_64);
}

// d += a b for a warp: a is 16 x 16, b is 16 x 8, both half. In a thread (g, t) = (lane / 4, lane % 4), a has
// columns {2 t, 2 t + 1} of rows g and g + 8, then columns {2 t + 8, 2 t + 9}; b has these rows of column g; d has
// columns {2 t, 2 t + 1} of rows g and g + 8.
LILY_INLINE void mma(float* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 weights of one row; pair(s, i) is pair i of two of product s of four, as exact integers in half.
template <uint BITS>
struct row_weights;
template <>
struct row_weights<4> {
    uint2 v;
    LILY_INLINE void clear() { v = uint2(0u); }
    LILY_INLINE void load(const uint4* row, uint quarter) {
        asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
            : "=r"(v.x), "=r"(v.y)
            : "l"(reinterpret_cast<const uint2*>(row) + quarter));
    }
    LILY_INLINE void load_staged(uint address) { v = load_words(address); }
    LILY_INLINE uint pair(uint s, uint i) const { return weight_pair<4>(v[s / 2], s % 2 * 2 + i); }
};
template <>
struct row_weights<8> {
    uint4 v;
    LILY_INLINE void clear() { v = uint4(0u); }
    LILY_INLINE void load(const uint4* row, uint quarter) { v = read_once(row + quarter); }
    LILY_INLINE void load_staged(uint address) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(address)
                     : "memory");
    }
    LILY_INLINE uint pair(uint s, uint i) const { return weight_pair<8>(v[s], i); }
};

// 16 values of x in the order of row_weights.
template <uint BITS>
struct row_acts {
    uint pair[8];
    LILY_INLINE void load(const act_t* x, bool live) {
        UNROLL for (uint i = 0; i < 2; i++) {
            uint4 t = uint4(0u);
            if (live) t = *reinterpret_cast<const uint4*>(x + i * 8);
            pair[4 * i] = BITS == 4 ? __byte_perm(t.x, t.z, 0x5410) : t.x;
            pair[4 * i + 1] = BITS == 4 ? __byte_perm(t.x, t.z, 0x7632) : t.y;
            pair[4 * i + 2] = BITS == 4 ? __byte_perm(t.y, t.w, 0x5410) : t.z;
            pair[4 * i + 3] = BITS == 4 ? __byte_perm(t.y, t.w, 0x7632) : t.w;
        }
    }
};

// Four rows side by side are in as many banks.
LILY_INLINE constexpr uint mv_place(uint row, uint c, uint width) {
    return row * width + (c ^ row % 4 * 2);
}

LILY_INLINE float of_two(uint bfloats, uint j) {
    return as_type<float>(j == 0 ? bfloats << 16 : bfloats & 0xffff0000u);
}

// What a warp multiplies at once: 128 columns, two groups, of rows g and g + 8. Of a group, thread t of four has
// columns 16 t to 16 t + 15.
constexpr uint MV_STEP = 2 * QUANT_GROUP;
template <uint BITS>
struct mv_weights {
    row_weights<BITS> v[2][2];  // row, group
    uint affine[2][2];          // row; the scales of both groups, then the biases
    LILY_INLINE void load(const uint4* w, const bfloat* scales, const bfloat* biases, uint k, uint at, uint lane) {
        const uint groups = k / QUANT_GROUP, group = at / QUANT_GROUP, second = min(group + 1, groups - 1);
        UNROLL for (uint r = 0; r < 2; r++) {
            const uint row = lane / 4 + 8 * r;
            UNROLL for (uint j = 0; j < 2; j++) {
                v[r][j].clear();
                if (group + j < groups)
                    v[r][j].load(w + row * (k * BITS / 128) + (at + j * QUANT_GROUP) * BITS / 128, lane % 4);
            }
            affine[r][0] = load_two(scales + row * groups, group, second, groups);
            affine[r][1] = load_two(biases + row * groups, group, second, groups);
        }
    }
    LILY_INLINE row_weights<BITS> row(uint r, uint j) const { return v[r][j]; }
    LILY_INLINE float scale(uint r, uint j) const { return of_two(affine[r][0], j); }
    LILY_INLINE float bias(uint r, uint j) const { return of_two(affine[r][1], j); }

private:
    LILY_INLINE static uint load_two(const bfloat* p, uint first, uint second, uint groups) {
        if (groups % 2 == 1) return uint(read_once(p + first).bits) | uint(read_once(p + second).bits) << 16;
        uint v;
        asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p + first));
        return v;
    }
};

// acc[s][2 r + c] += the products of rows g + 8 r of set s with row 2 t + c of x, of which there are `count`, `stride`
// apart.
template <uint BITS, uint SETS, class W>
LILY_INLINE void mv_step(float (*acc)[4], const W* w, const act_t* x, uint stride, uint count, uint k, uint at,
                         uint lane) {
    UNROLL for (uint j = 0; j < 2; j++) {
        const uint own = at + j * QUANT_GROUP + lane % 4 * 16;
        row_acts<BITS> columns;
        columns.load(x + lane / 4 * stride + own, lane / 4 < count && own < k);
        float sum[4] = {0, 0, 0, 0};
        UNROLL for (uint p = 0; p < 4; p++)
            mma(sum, HALF2_ONE, HALF2_ONE, HALF2_ONE, HALF2_ONE, columns.pair[2 * p], columns.pair[2 * p + 1]);
        // Biases first, so that the sums need no registers any more.
        UNROLL for (uint i = 0; i < SETS * 4; i++)
            acc[i / 4][i % 4] = fma(w[i / 4].bias(i % 4 / 2, j), sum[i % 4], acc[i / 4][i % 4]);
        UNROLL for (uint s = 0; s < SETS; s++) {
            const row_weights<BITS> upper = w[s].row(0, j), lower = w[s].row(1, j);
            float dot[4] = {0, 0, 0, 0};
            UNROLL for (uint p = 0; p < 4; p++)
                mma(dot, upper.pair(p, 0), lower.pair(p, 0), upper.pair(p, 1), lower.pair(p, 1), columns.pair[2 * p],
                    columns.pair[2 * p + 1]);
            UNROLL for (uint i = 0; i < 4; i++) acc[s][i] = fma(w[s].scale(i / 2, j), dot[i], acc[s][i]);
        }
    }
}

// A simdgroup's sums to out: a row of x's `stride` from the next one's, a set's beside those of all simdgroups.
template <uint SETS>
LILY_INLINE void mv_write(const float (*acc)[4], uint count, float* out, uint stride, uint lane) {
    UNROLL for (uint i = 0; i < SETS * 4; i++) {
        const uint r = lane % 4 * 2 + i % 2;
        if (r < count) out[i / 4 * simdgroups(8) * MV_ROWS + r * stride + lane / 4 + i % 4 / 2 * 8] = acc[i / 4][i % 4];
    }
}

// The first weights of a simdgroup's SETS sets of 16 rows, in its part of SPLIT of k, in registers: all of them, as far
// as those allow.
template <uint BITS, uint SPLIT, uint K = 0, uint SETS = 1>
struct mv_kept {
    static constexpr uint ALL = (K + SPLIT * MV_STEP - 1) / (SPLIT * MV_STEP), MOST = SETS > 1 || BITS == 8 ? 2 : 4;
    static constexpr uint STEPS = ALL == 0 ? 2 : min(ALL, MOST);
    mv_weights<BITS> v[STEPS][SETS];
    // What a step takes; w, scales and biases begin at the simdgroup's first row.
    LILY_INLINE void load(uint i, const uint4* w, const bfloat* scales, const bfloat* biases, uint k, uint at,
                          uint apart, uint left, uint lane) {
        UNROLL for (uint s = 0; s < SETS; s++)
            if (s == 0 || s * apart < left)
                v[i][s].load(w + s * apart * (k * BITS / 128), scales + s * apart * (k / QUANT_GROUP),
                             biases + s * apart * (k / QUANT_GROUP), k, at, lane);
    }
    LILY_INLINE void begin(const uint4* w, const bfloat* scales, const bfloat* biases, uint k, uint row, uint apart,
                           uint left, uint lane, uint simd) {
        const uint own = row + simd / SPLIT * MV_ROWS, g = own * (k / QUANT_GROUP);
        UNROLL for (uint i = 0; i < STEPS; i++) {
            const uint at = (simd % SPLIT + i * SPLIT) * MV_STEP;
            if (at < k) load(i, w + own * (k * BITS / 128), scales + g, biases + g, k, at, apart, left, lane);
        }
    }
};

// Sums of a simdgroup's sets of 16 rows with `count` rows of x, `stride` apart, over its part of SPLIT of k; those of a
// row of x go to out, `out_stride` from each other. `ahead` has the first weights.
template <uint BITS, uint SPLIT, uint K, uint SETS>
LILY_INLINE void mv_sums(mv_kept<BITS, SPLIT, K, SETS>& ahead, const act_t* x, uint stride, uint count, const uint4* w,
                         const bfloat* scales, const bfloat* biases, uint k, uint part, uint apart, uint left,
                         float* out, uint out_stride, uint lane) {
    float acc[SETS][4];
    UNROLL for (uint i = 0; i < SETS * 4; i++) acc[i / 4][i % 4] = 0;
    constexpr uint STEPS = mv_kept<BITS, SPLIT, K, SETS>::STEPS, TURN = STEPS * SPLIT * MV_STEP;
    for (uint first = part * MV_STEP; first < k; first += TURN)
        UNROLL for (uint i = 0; i < STEPS; i++) {
            const uint at = first + i * SPLIT * MV_STEP;
            if (at >= k) break;
            mv_step<BITS, SETS>(acc, ahead.v[i], x, stride, count, k, at, lane);
            if (at + TURN < k) ahead.load(i, w, scales, biases, k, at + TURN, apart, left, lane);
        }
    mv_write<SETS>(acc, count, out, out_stride, lane);
}

// The same in threadgroup memory, all weights of a simdgroup's part, which is contiguous here: registers are free for
// launches that run at the same time, and for more threadgroups.
template <uint SPLIT, uint K, uint SETS>
struct mv_staged {
    static constexpr uint COLUMNS = K / SPLIT, WIDTH = COLUMNS / 32, STEPS = COLUMNS / MV_STEP, ROWS = SETS * MV_ROWS;
    struct memory {
        uint4 w[ROWS * WIDTH];
        uint scales[ROWS][STEPS], biases[ROWS][STEPS];  // of two groups each
    };
    const memory* own;
    LILY_INLINE void begin(const uint4* w, const bfloat* scales, const bfloat* biases, uint, uint row, uint apart,
                           uint left, uint lane, uint simd) {
        __shared__ memory all[simdgroups(8)];
        memory& m = all[simd];
        own = &m;
        const uint first = simd % SPLIT * COLUMNS, row0 = row + simd / SPLIT * MV_ROWS;
        UNROLL for (uint s = 0; s < SETS; s++) {
            if (s > 0 && s * apart >= left) break;
            const uint from = row0 + s * apart;
            UNROLL for (uint i = 0; i < MV_ROWS * WIDTH / SIMD_WIDTH; i++) {
                const uint r = i * (SIMD_WIDTH / WIDTH) + lane / WIDTH, c = lane % WIDTH;
                copy_async(m.w + mv_place(s * MV_ROWS + r, c, WIDTH), w + (from + r) * (K / 32) + first / 32 + c);
            }
            const uint r = lane % MV_ROWS, at = (from + r) * (K / QUANT_GROUP) + first / QUANT_GROUP;
            if (lane < MV_ROWS)
                copy_async_few<4 * STEPS>(m.scales[s * MV_ROWS + r], scales + at);
            else
                copy_async_few<4 * STEPS>(m.biases[s * MV_ROWS + r], biases + at);
        }
        copy_async_end();
    }
    // Step i of set s as mv_weights, read where it is used.
    struct step {
        const memory* own;
        uint s, i, lane;
        LILY_INLINE uint place(uint r) const { return s * MV_ROWS + lane / 4 + 8 * r; }
        LILY_INLINE row_weights<4> row(uint r, uint j) const {
            const uint4* at = own->w + mv_place(place(r), (i * 2 + j) * 2 + lane % 4 / 2, WIDTH);
            return {reinterpret_cast<const uint2*>(at)[lane % 2]};
        }
        LILY_INLINE float scale(uint r, uint j) const { return of_two(own->scales[place(r)][i], j); }
        LILY_INLINE float bias(uint r, uint j) const { return of_two(own->biases[place(r)][i], j); }
    };
};

template <uint SPLIT, uint K, uint SETS>
LILY_INLINE void mv_finish(const mv_staged<SPLIT, K, SETS>& ahead, const act_t* x, const uint4*, const bfloat*,
                           const bfloat*, uint, uint, uint, uint, float* part, uint lane, uint simd) {
    using staged = mv_staged<SPLIT, K, SETS>;
    copy_async_wait<0>();
    __syncwarp();
    float acc[SETS][4];
    UNROLL for (uint i = 0; i < SETS * 4; i++) acc[i / 4][i % 4] = 0;
    // One step at a time: what another one needs in registers is worth more threadgroups.
    _Pragma("unroll 1") for (uint i = 0; i < staged::STEPS; i++) {
        typename staged::step w[SETS];
        UNROLL for (uint s = 0; s < SETS; s++) w[s] = {ahead.own, s, i, lane};
        mv_step<4, SETS>(acc, w, x, 0, 1, K, simd % SPLIT * staged::COLUMNS + i * MV_STEP, lane);
    }
    mv_write<SETS>(acc, 1, part + simd * MV_ROWS, 0, lane);
}

template <uint BITS, uint SPLIT, uint K, uint SETS, bool STAGED>
struct mv_chosen {
    using type = mv_kept<BITS, SPLIT, K, SETS>;
};
template <uint SPLIT, uint K, uint SETS>
struct mv_chosen<4, SPLIT, K, SETS, true> {
    using type = mv_staged<SPLIT, K, SETS>;
};
template <uint BITS, uint SPLIT, uint K = 0, uint SETS = 1>
using mv_ahead = typename mv_chosen<BITS, SPLIT, K, SETS, BITS == 4 && stages(K / SPLIT, SETS)>::type;

template <uint BITS, uint SPLIT, uint K, uint SETS>
LILY_INLINE void mv_finish(mv_kept<BITS, SPLIT, K, SETS>& ahead, const act_t* x, const uint4* w, const bfloat* scales,
                           const bfloat* biases, uint k, uint row, uint apart, uint left, float* part, uint lane,
                           uint simd) {
    const uint own = row + simd / SPLIT * MV_ROWS, g = own * (k / QUANT_GROUP);
    mv_sums(ahead, x, 0, 1, w + own * (k * BITS / 128), scales + g, biases + g, k, simd % SPLIT, apart, left,
            part + simd * MV_ROWS, 0, lane);
}

template <uint BITS, uint SPLIT>
LILY_INLINE void mv_many(const act_t* x, uint count, const uint4* w, const bfloat* scales, const bfloat* biases, uint k,
                         uint row, uint, float* part, uint lane, uint simd) {
    const uint own = row + simd / SPLIT * MV_ROWS, g = own * (k / QUANT_GROUP);
    mv_kept<BITS, SPLIT> ahead;
    ahead.begin(w, scales, biases, k, row, 0, 0, lane, simd);
    mv_sums(ahead, x, k, count, w + own * (k * BITS / 128), scales + g, biases + g, k, simd % SPLIT, 0, 0,
            part + simd * MV_ROWS, simdgroups(8) * MV_ROWS, lane);
}

// Lanes read x in small pieces, step after step; so the way is paid once. What a thread asks for comes by itself until
// mv_input_ready().
template <uint MOST>
LILY_INLINE const act_t* mv_input(const act_t* x, uint n, uint tid, uint threads) {
    __shared__ alignas(16) act_t staged[MOST];
    if (n > MOST) return x;
    for (uint i = tid * 8; i < n; i += threads * 8) copy_async(staged + i, x + i);
    copy_async_end();
    return staged;
}
LILY_INLINE void mv_input_ready() {
    copy_async_wait<0>();
}
