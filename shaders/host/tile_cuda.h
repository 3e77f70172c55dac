// Tuned bodies of the helpers of tile.h for NVIDIA GPUs: products by tensor cores, through wgmma where there is it
// (Hopper) and mma.sync elsewhere. Both take the transposed product: rows of weights, or of the right tile, are the
// 16-row operand of a warp, and rows of x the other one, of which there may be few. So weights are unpacked in the
// registers in which they are multiplied.
#pragma once

#define LILY_TUNED_TILE
#define LILY_TUNED_PRODUCT
constexpr uint X_STEPS = 3;     // steps of x in flight: being written, about to be read, being read
constexpr uint MMA_ROWS = 16;   // of the right operand, of a warp
constexpr uint MMA_COLUMNS = 8;
constexpr uint ROW_PIECES = TILE_K / 8;  // of 16 bytes

template <uint BM>
constexpr uint tile_x_room() {
    return X_STEPS * BM * TILE_K;
}
constexpr uint AFFINE_GROUPS = 4;  // whose scales and biases are staged at once
constexpr uint tile_w_room() {
    return 2 * 2 * AFFINE_GROUPS * TILE_N * 2;  // two matrices, two turns, of {scale, bias}
}

LILY_INLINE uint shared_address(const void* p) {
    return uint(__cvta_generic_to_shared(p));
}

// A row is 128 bytes, whose 16-byte pieces are exchanged by the row's lowest bits: so the pieces of one column in eight
// rows lie in all banks, and wgmma knows the pattern.
LILY_INLINE uint tile_at(uint row, uint col) {
    return row * TILE_K + ((col / 8 ^ row % 8) * 8 + col % 8);
}
LILY_INLINE void tile_put8(act_t* tile, uint row, uint col, uint4 v) {
    *reinterpret_cast<uint4*>(tile + tile_at(row, col)) = v;
}

LILY_INLINE uint4 pack8(const float* v) {
    return uint4(pack2_acts(v[0], v[1]), pack2_acts(v[2], v[3]), pack2_acts(v[4], v[5]), pack2_acts(v[6], v[7]));
}
LILY_INLINE uint4 acts8(const bfloat* from) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    uint4 r;
    UNROLL for (uint i = 0; i < 4; i++)
        r[i] = pack2_acts(as_type<float>(v[i] << 16), as_type<float>(v[i] & 0xffff0000u));
    return r;
}

// ---- tensor cores

LILY_INLINE void load_matrices(uint* r, uint address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
LILY_INLINE void load_transposed(uint* r, uint address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
// d[BM / 8][4] += a b^T over 16 columns of a tile of BM rows from piece `piece` on, for a warp.
template <uint BM>
LILY_INLINE void warp_mma(float* d, const uint* a, const act_t* tile, uint piece) {
    const uint lane = threadIdx.x % SIMD_WIDTH;
    if constexpr (BM == MMA_COLUMNS) {
        const uint at = shared_address(tile + tile_at(lane % 8, (piece + lane / 8 % 2) * 8));
        uint b0, b1;
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(b0), "=r"(b1)
                     : "r"(at)
                     : "memory");
        mma(d, a[0], a[1], a[2], a[3], b0, b1);
    } else {
        UNROLL for (uint n = 0; n < BM; n += 2 * MMA_COLUMNS) {
            uint b[4];
            load_matrices(b, shared_address(tile + tile_at(n + lane / 16 * 8 + lane % 8, (piece + lane / 8 % 2) * 8)));
            mma(d + n / 2, a[0], a[1], a[2], a[3], b[0], b[1]);
            mma(d + n / 2 + 4, a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define LILY_WARPGROUP 1
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
// d += a b^T over 16 columns, for the four warps of a warpgroup together; b describes the tile from these columns on.
template <uint BM>
LILY_INLINE void warpgroup_mma(float* d, const uint* a, ulong b);
template <>
LILY_INLINE void warpgroup_mma<8>(float* d, const uint* a, ulong b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
        "{%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
        : D4(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
LILY_INLINE void warpgroup_mma<16>(float* d, const uint* a, ulong b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
        : D4(0), D4(4)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
LILY_INLINE void warpgroup_mma<32>(float* d, const uint* a, ulong b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
        : D16(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
LILY_INLINE void warpgroup_mma<64>(float* d, const uint* a, ulong b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
        "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
        : D16(0), D16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// d += a b^T, both in memory.
LILY_INLINE void warpgroup_mma_tiles(float* d, ulong a, ulong b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
        "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, 1, 1, 1, 0, 0;"
        : D16(0), D16(16)
        : "l"(a), "l"(b));
}
// d += a b: b has a row for every column of a.
LILY_INLINE void warpgroup_mma_plain(float* d, const uint* a, ulong b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
        "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : D16(0), D16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef D4
#undef D16

// A tile of rows of 128 bytes in memory, with the exchange of tile_at.
LILY_INLINE ulong tile_descriptor(const act_t* tile) {
    return ulong(shared_address(tile) >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
LILY_INLINE void warpgroup_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
LILY_INLINE void warpgroup_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <uint PENDING>
LILY_INLINE void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// What threads have stored is seen by wgmma after this and a barrier.
LILY_INLINE void publish_tile() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The compiler does not know that wgmma works on: what it computes for these registers, it must have computed before.
template <uint N>
LILY_INLINE void settle(float* d) {
    UNROLL for (uint i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
LILY_INLINE void settle(uint (&a)[4][4]) {
    UNROLL for (uint s = 0; s < 4; s++)
        UNROLL for (uint i = 0; i < 4; i++) asm volatile("" : "+r"(a[s][i])::"memory");
}
// Waits for all products; their results must not be read before.
template <uint N>
LILY_INLINE void warpgroup_finish(float (&d)[N]) {
    warpgroup_wait<0>();
    settle<N>(d);
}
#else
#define LILY_WARPGROUP 0
LILY_INLINE void warpgroup_begin() {}
LILY_INLINE void warpgroup_end() {}
template <uint PENDING>
LILY_INLINE void warpgroup_wait() {}
LILY_INLINE void publish_tile() {}
template <uint N>
LILY_INLINE void warpgroup_finish(float (&)[N]) {}
#endif

// ---- accumulators

// Blocks of 64 columns (16 of each of 4 warps), of these all rows, eight at a time: four elements of a thread are at
// columns {c, c, c + 8, c + 8} and rows {r, r + 1, r, r + 1}.
template <uint BM, uint BN, uint SIMDS, bool PLAIN = false>
struct tile_acc {
    static_assert(SIMDS == 4 && BN % 64 == 0 && BM % MMA_COLUMNS == 0);
    static constexpr uint BLOCKS = BN / 64, BLOCK_VALUES = BM / 2;
    float v[BLOCKS * BLOCK_VALUES];
    uint columns;
    LILY_INLINE float& operator[](uint i) { return v[i]; }
};
template <uint BM, uint BN, uint SIMDS, bool PLAIN>
LILY_INLINE constexpr uint tile_capacity(const tile_acc<BM, BN, SIMDS, PLAIN>&) {
    return BM * BN / (SIMDS * SIMD_WIDTH);
}
template <class Acc>
LILY_INLINE uint tile_row(const Acc&, uint i) {
    return i % Acc::BLOCK_VALUES / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
}
template <class Acc>
LILY_INLINE uint tile_col(const Acc&, uint i) {
    const uint warp = threadIdx.x / SIMD_WIDTH, lane = threadIdx.x % SIMD_WIDTH;
    return i / Acc::BLOCK_VALUES * 64 + warp * MMA_ROWS + lane / 4 + i / 2 % 2 * 8;
}
template <class Acc>
LILY_INLINE bool tile_valid(const Acc& acc, uint i) {
    return i / Acc::BLOCK_VALUES * 64 < acc.columns;
}
template <class Acc>
LILY_INLINE void tile_clear(Acc& acc, uint, uint) {
    acc.columns = Acc::BLOCKS * 64;
    UNROLL for (uint i = 0; i < Acc::BLOCKS * Acc::BLOCK_VALUES; i++) acc.v[i] = 0;
}

template <uint BM, uint BN, uint SIMDS>
LILY_INLINE void tile_multiply(tile_acc<BM, BN, SIMDS>& acc, const act_t* a, const act_t* b, uint, uint) {
    const uint lane = threadIdx.x % SIMD_WIDTH, row = threadIdx.x / SIMD_WIDTH * MMA_ROWS + lane % 16;
    UNROLL for (uint f = 0; f < acc.BLOCKS; f++)
        UNROLL for (uint piece = 0; piece < ROW_PIECES; piece += 2) {
            uint rows[4];
            load_matrices(rows, shared_address(b + tile_at(f * 64 + row, (piece + lane / 16) * 8)));
            warp_mma<BM>(acc.v + f * acc.BLOCK_VALUES, rows, a, piece);
        }
}
template <uint BM, uint BN, uint SIMDS>
LILY_INLINE void tile_multiply_plain(tile_acc<BM, BN, SIMDS, true>& acc, const act_t* a, const act_t* b, uint) {
    static_assert(BN == TILE_K);
    const uint lane = threadIdx.x % SIMD_WIDTH, column = threadIdx.x / SIMD_WIDTH * MMA_ROWS + lane / 8 % 2 * 8;
    UNROLL for (uint piece = 0; piece < ROW_PIECES; piece += 2) {
        uint columns[4];
        load_transposed(columns, shared_address(b + tile_at(piece * 8 + lane / 16 * 8 + lane % 8, column)));
        warp_mma<BM>(acc.v, columns, a, piece);
    }
}

// ---- quantised products
//
// The order of k within a group of 64 is that in which weights are unpacked: thread t of four has weights 16 t to
// 16 t + 15 of a row, and each of four products takes four of them. x is stored in that order.

// Eight values of x from column 8 * piece on, in the order of row_weights.
template <uint BITS>
LILY_INLINE void put_x(act_t* tile, uint row, uint piece, uint4 v) {
    uint pair[4] = {v.x, v.y, v.z, v.w};
    if (BITS == 4) {
        pair[0] = __byte_perm(v.x, v.z, 0x5410);
        pair[1] = __byte_perm(v.x, v.z, 0x7632);
        pair[2] = __byte_perm(v.y, v.w, 0x5410);
        pair[3] = __byte_perm(v.y, v.w, 0x7632);
    }
    UNROLL for (uint i = 0; i < 4; i++)
        *reinterpret_cast<uint*>(tile + tile_at(row, (piece % 2 * 4 + i) * 8) + piece / 2 * 2) = pair[i];
}

// The rows of x that a thread stages, 16 bytes at a time.
template <uint BITS, uint BM, uint THREADS>
struct x_stream {
    static constexpr uint COUNT = (BM * ROW_PIECES + THREADS - 1) / THREADS;
    static constexpr uint NOTHING = 0xffffffff;
    const act_t* x;
    uint from[COUNT];
    uint4 v[COUNT];
    template <class Rows>
    LILY_INLINE void begin(const act_t* all, Rows rows, uint stride, uint live, uint tid) {
        x = all;
        UNROLL for (uint i = 0; i < COUNT; i++) {
            const uint row = tid / ROW_PIECES + i * (THREADS / ROW_PIECES);
            from[i] = row < live ? rows.at(row) * stride + tid % ROW_PIECES * 8 : NOTHING;
        }
    }
    LILY_INLINE void load(uint at) {
        UNROLL for (uint i = 0; i < COUNT; i++)
            v[i] = from[i] != NOTHING ? *reinterpret_cast<const uint4*>(x + from[i] + at) : uint4(0u);
    }
    LILY_INLINE void put(act_t* tile, uint tid) const {
        UNROLL for (uint i = 0; i < COUNT; i++) {
            const uint row = tid / ROW_PIECES + i * (THREADS / ROW_PIECES);
            if (row < BM) put_x<BITS>(tile, row, tid % ROW_PIECES, v[i]);
        }
    }
};

// A thread's rows of a tile of weights: two of each block of 64.
template <uint BITS>
struct w_stream {
    static constexpr uint ROWS = TILE_N / 64 * 2;
    const uint4* w;  // the thread's first row
    uint row_step, block_step;
    row_weights<BITS> v[ROWS];
    LILY_INLINE void begin(quant_matrix<BITS> m, uint k, uint columns, uint tid) {
        const uint stride = k * BITS / 128;
        w = m.w + (tid / SIMD_WIDTH * MMA_ROWS + tid % SIMD_WIDTH / 4) * stride;
        row_step = 8 * stride;
        block_step = columns > 64 ? 64 * stride : 0;  // any rows, where there are none
    }
    LILY_INLINE void load(uint at, uint tid) {
        UNROLL for (uint r = 0; r < ROWS; r++)
            v[r].load(w + (r / 2 * block_step + r % 2 * row_step + at * BITS / 128), tid % 4);
    }
};

// Scales and biases of a tile's rows, a row for each thread. They lie as {scale, bias} in half, by group and row.
struct affine_stream {
    const bfloat* scales;
    const bfloat* biases;
    uint groups;
    uint2 s, b;  // of four groups
    template <uint BITS>
    LILY_INLINE void begin(quant_matrix<BITS> m, uint k, uint columns, uint tid) {
        const uint row = tid < columns ? tid : 0;
        groups = k / QUANT_GROUP;
        scales = m.scales + row * groups;
        biases = m.biases + row * groups;
    }
    LILY_INLINE static uint2 four(const bfloat* p, uint first, uint groups) {
        if (groups % AFFINE_GROUPS == 0) return *reinterpret_cast<const uint2*>(p + first);
        uint v[4];
        UNROLL for (uint i = 0; i < 4; i++) v[i] = p[min(first + i, groups - 1)].bits;
        return uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
    }
    LILY_INLINE void load(uint at) {
        s = four(scales, at / QUANT_GROUP, groups);
        b = four(biases, at / QUANT_GROUP, groups);
    }
    LILY_INLINE void put(uint* affine, uint tid) const {
        UNROLL for (uint i = 0; i < 4; i++) {
            const uint scale = s[i / 2] >> i % 2 * 16 << 16, bias = b[i / 2] >> i % 2 * 16 << 16;
            affine[i * TILE_N + tid] = pack2(as_type<float>(scale), as_type<float>(bias));
        }
    }
};

// acc += x w^T over one step, whose x lies in `tile` and whose scales and biases in `affine`. With wgmma the last
// product may still be at work when this returns.
template <uint BITS, uint BM, uint SIMDS>
LILY_INLINE void multiply_step(tile_acc<BM, TILE_N, SIMDS>& acc, const row_weights<BITS>* w, const act_t* tile,
                               const uint* affine, uint tid) {
    UNROLL for (uint f = 0; f < acc.BLOCKS; f++) {
        uint scale[2], bias[2];
        UNROLL for (uint r = 0; r < 2; r++) {
            const uint own = affine[f * 64 + tid / SIMD_WIDTH * MMA_ROWS + tid % SIMD_WIDTH / 4 + r * 8];
            scale[r] = __byte_perm(own, 0, 0x1010);
            bias[r] = __byte_perm(own, 0, 0x3232);
        }
        // Of product s, pair i / 2 of row i % 2.
        const auto weights = [&](uint s, uint i) {
            return half2_fma(w[2 * f + i % 2].pair(s, i / 2), scale[i % 2], bias[i % 2]);
        };
        float* sums = acc.v + f * acc.BLOCK_VALUES;
#if LILY_WARPGROUP
        uint a[4][4];
        UNROLL for (uint s = 0; s < 4; s++)
            UNROLL for (uint i = 0; i < 4; i++) a[s][i] = weights(s, i);
        settle(a);
        settle<tile_acc<BM, TILE_N, SIMDS>::BLOCK_VALUES>(sums);
        warpgroup_begin();
        UNROLL for (uint s = 0; s < 4; s++) warpgroup_mma<BM>(sums, a[s], tile_descriptor(tile) + 2 * s);
        warpgroup_end();
        warpgroup_wait<1>();
#else
        UNROLL for (uint s = 0; s < 4; s++) {
            const uint a[4] = {weights(s, 0), weights(s, 1), weights(s, 2), weights(s, 3)};
            warp_mma<BM>(sums, a, tile, 2 * s);
        }
#endif
    }
}

// One matrix of a product. With wgmma, weights of a step come from memory during the one before it; mma.sync needs the
// registers that this takes for its operands.
template <uint BITS, uint BM, uint SIMDS>
struct w_operand {
    w_stream<BITS> next;
    row_weights<BITS> now[w_stream<BITS>::ROWS];
    affine_stream scale;
    uint* affine;  // two turns of four groups
    LILY_INLINE void begin(quant_matrix<BITS> w, uint k, uint columns, act_t* ws, uint tid) {
        affine = reinterpret_cast<uint*>(ws);
        next.begin(w, k, columns, tid);
        scale.begin(w, k, columns, tid);
        if (LILY_WARPGROUP) next.load(0, tid);
        scale.load(0);
        scale.put(affine, tid);
    }
    // Before the barrier of step `step`, at k = `at`; and after it.
    LILY_INLINE void turn(uint at, uint tid) {
        if (!LILY_WARPGROUP) next.load(at, tid);
        UNROLL for (uint r = 0; r < next.ROWS; r++) now[r] = next.v[r];
    }
    LILY_INLINE void fetch(uint at, uint k, uint step, uint tid) {
        if (LILY_WARPGROUP && at + TILE_K < k) next.load(at + TILE_K, tid);
        const uint coming = (step / AFFINE_GROUPS + 1) * AFFINE_GROUPS;
        if (coming * TILE_K >= k) return;
        if (step % AFFINE_GROUPS == 1) scale.load(coming * TILE_K);
    }
    LILY_INLINE void multiply(tile_acc<BM, TILE_N, SIMDS>& acc, const act_t* tile, uint k, uint step, uint tid) {
        const uint turn = step / AFFINE_GROUPS;
        multiply_step<BITS, BM, SIMDS>(acc, now, tile,
                                       affine + (turn % 2 * AFFINE_GROUPS + step % AFFINE_GROUPS) * TILE_N, tid);
        if (step % AFFINE_GROUPS == AFFINE_GROUPS - 1 && (step + 1) * TILE_K < k)
            scale.put(affine + (turn + 1) % 2 * AFFINE_GROUPS * TILE_N, tid);
    }
};

template <uint BITS, uint BM, uint SIMDS, class Rows>
LILY_INLINE void quant_multiply(tile_acc<BM, TILE_N, SIMDS>& acc, const act_t* x, Rows rows, quant_matrix<BITS> w,
                                uint k, uint live, uint columns, act_t* xs, act_t* ws, uint tid) {
    x_stream<BITS, BM, SIMDS * SIMD_WIDTH> x_next;
    w_operand<BITS, BM, SIMDS> operand;
    x_next.begin(x, rows, k, live, tid);
    x_next.load(0);
    operand.begin(w, k, columns, ws, tid);
    acc.columns = columns;
    for (uint at = 0, step = 0; at < k; at += TILE_K, step++) {
        act_t* tile = xs + step % X_STEPS * (BM * TILE_K);
        x_next.put(tile, tid);
        operand.turn(at, tid);
        publish_tile();
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (at + TILE_K < k) x_next.load(at + TILE_K);
        operand.fetch(at, k, step, tid);
        operand.multiply(acc, tile, k, step, tid);
    }
    warpgroup_finish(acc.v);
}
template <uint BITS, uint BM, uint SIMDS, class Rows>
LILY_INLINE void quant_multiply_pair(tile_acc<BM, TILE_N, SIMDS>& first, tile_acc<BM, TILE_N, SIMDS>& second,
                                     const act_t* x, Rows rows, quant_matrix<BITS> w1, quant_matrix<BITS> w2, uint k,
                                     uint live, uint columns, act_t* xs, act_t* ws, uint tid) {
    x_stream<BITS, BM, SIMDS * SIMD_WIDTH> x_next;
    w_operand<BITS, BM, SIMDS> operand1, operand2;
    x_next.begin(x, rows, k, live, tid);
    x_next.load(0);
    operand1.begin(w1, k, columns, ws, tid);
    operand2.begin(w2, k, columns, ws + tile_w_room() / 2, tid);
    first.columns = second.columns = columns;
    for (uint at = 0, step = 0; at < k; at += TILE_K, step++) {
        act_t* tile = xs + step % X_STEPS * (BM * TILE_K);
        x_next.put(tile, tid);
        operand1.turn(at, tid);
        operand2.turn(at, tid);
        publish_tile();
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (at + TILE_K < k) x_next.load(at + TILE_K);
        operand1.fetch(at, k, step, tid);
        operand2.fetch(at, k, step, tid);
        operand1.multiply(first, tile, k, step, tid);
        operand2.multiply(second, tile, k, step, tid);
    }
    warpgroup_finish(first.v);
    warpgroup_finish(second.v);
}
