// Tuned bodies of the helpers of tile.h for NVIDIA GPUs: products by tensor cores, through wgmma where there is it
// (Hopper) and mma.sync elsewhere. Both take the transposed product: rows of weights, or of the right tile, are the
// 16-row operand of a warp, and rows of x the other one, of which there may be few. So weights are unpacked in the
// registers in which they are multiplied.
#pragma once

#define LILY_TUNED_TILE
#define LILY_TUNED_PRODUCT
#define LILY_TUNED_ADD
constexpr uint X_TILES = 3;     // tiles of x: being written, about to be read, being read
constexpr uint MMA_ROWS = 16;   // of the right operand, of a warp
constexpr uint MMA_COLUMNS = 8;
constexpr uint ROW_PIECES = TILE_K / 8;  // of 16 bytes

// Columns of a tile of x: a threadgroup meets once for each.
template <uint BM>
constexpr uint x_depth() {
    static_assert(BM <= 64 && 4096 % (BM * TILE_K) == 0);
    return 4096 / BM;
}
template <uint BM>
constexpr uint tile_x_room() {
    return X_TILES * BM * x_depth<BM>();
}
constexpr uint MOST_MEMORY = 99 << 10;  // bytes of a threadgroup, on all GPUs
constexpr uint AFFINE_GROUPS = 4;  // whose scales and biases are staged at once
constexpr uint tile_w_room() {
    return 2 * AFFINE_GROUPS * TILE_N * 4;  // two matrices, of {scale, scale, bias, bias}
}

// An address that a thread needs in every step: the compiler would rather compute it again, with more instructions than
// the step has otherwise.
LILY_INLINE uint kept(uint v) {
    asm volatile("" : "+r"(v));
    return v;
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
// d[BM / 8][4] += a b^T over 16 columns of the tile of BM rows at `tile`, from piece `piece` on, for a warp.
template <uint BM>
LILY_INLINE void warp_mma(float* d, const uint* a, uint tile, uint piece) {
    const uint lane = threadIdx.x % SIMD_WIDTH;
    if constexpr (BM == MMA_COLUMNS) {
        const uint at = tile + 2 * tile_at(lane % 8, (piece + lane / 8 % 2) * 8);
        uint b0, b1;
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(b0), "=r"(b1)
                     : "r"(at)
                     : "memory");
        mma(d, a[0], a[1], a[2], a[3], b0, b1);
    } else {
        UNROLL for (uint n = 0; n < BM; n += 2 * MMA_COLUMNS) {
            uint b[4];
            load_matrices(b, tile + 2 * tile_at(n + lane / 16 * 8 + lane % 8, (piece + lane / 8 % 2) * 8));
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
LILY_INLINE ulong tile_descriptor(uint tile) {
    return ulong(tile >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
LILY_INLINE ulong tile_descriptor(const act_t* tile) {
    return tile_descriptor(shared_address(tile));
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

// An addition in memory differs by subnormals alone, and no thread waits for it; each element has but one.
template <class Acc>
LILY_INLINE void tile_add(Acc& acc, float* y, uint stride, uint live) {
    UNROLL for (uint i = 0; i < Acc::BLOCKS * Acc::BLOCK_VALUES; i++)
        if (tile_valid(acc, i) && tile_row(acc, i) < live)
            asm volatile("red.global.add.f32 [%0], %1;" ::"l"(y + (tile_row(acc, i) * stride + tile_col(acc, i))),
                         "f"(acc.v[i])
                         : "memory");
}

template <uint BM, uint BN, uint SIMDS>
LILY_INLINE void tile_multiply(tile_acc<BM, BN, SIMDS>& acc, const act_t* a, const act_t* b, uint, uint) {
    const uint lane = threadIdx.x % SIMD_WIDTH, row = threadIdx.x / SIMD_WIDTH * MMA_ROWS + lane % 16;
    UNROLL for (uint f = 0; f < acc.BLOCKS; f++)
        UNROLL for (uint piece = 0; piece < ROW_PIECES; piece += 2) {
            uint rows[4];
            load_matrices(rows, shared_address(b + tile_at(f * 64 + row, (piece + lane / 16) * 8)));
            warp_mma<BM>(acc.v + f * acc.BLOCK_VALUES, rows, shared_address(a), piece);
        }
}
template <uint BM, uint BN, uint SIMDS>
LILY_INLINE void tile_multiply_plain(tile_acc<BM, BN, SIMDS, true>& acc, const act_t* a, const act_t* b, uint) {
    static_assert(BN == TILE_K);
    const uint lane = threadIdx.x % SIMD_WIDTH, column = threadIdx.x / SIMD_WIDTH * MMA_ROWS + lane / 8 % 2 * 8;
    UNROLL for (uint piece = 0; piece < ROW_PIECES; piece += 2) {
        uint columns[4];
        load_transposed(columns, shared_address(b + tile_at(piece * 8 + lane / 16 * 8 + lane % 8, column)));
        warp_mma<BM>(acc.v, columns, shared_address(a), piece);
    }
}

// ---- quantised products
//
// The order of k within a group of 64 is that in which weights are unpacked: thread t of four has weights 16 t to
// 16 t + 15 of a row, and each of four products takes four of them. x is stored in that order.

// The pieces of 16 bytes of x that a thread stages: of rows THREADS / ROW_PIECES apart, if those of 64 columns behind
// another are counted as rows of their own. Rows from `live` on are the last one again: nobody reads their products.
template <uint BITS, uint BM, uint THREADS>
struct x_stream {
    static constexpr uint COUNT = BM * x_depth<BM>() / 8 / THREADS, APART = THREADS / ROW_PIECES;
    const act_t* from[COUNT];
    uint4 v[COUNT];
    uint place[4];  // of a piece's words, in bytes
    LILY_INLINE static uint column(uint i, uint tid) { return (tid / ROW_PIECES + i * APART) / BM * TILE_K; }
    template <class Rows>
    LILY_INLINE void begin(const act_t* x, Rows rows, uint stride, uint live, uint tid) {
        const uint piece = tid % ROW_PIECES;
        UNROLL for (uint i = 0; i < COUNT; i++) {
            const uint row = min((tid / ROW_PIECES + i * APART) % BM, live - 1);
            from[i] = x + (rows.at(row) * stride + column(i, tid) + piece * 8);
            v[i] = uint4(0u);
        }
        UNROLL for (uint i = 0; i < 4; i++)
            place[i] = kept(2 * tile_at(tid / ROW_PIECES, (piece % 2 * 4 + i) * 8) + piece / 2 * 4);
    }
    // The next columns, of which there are `left`.
    LILY_INLINE void load(uint left, uint tid) {
        UNROLL for (uint i = 0; i < COUNT; i++) {
            if (x_depth<BM>() == TILE_K || column(i, tid) < left) v[i] = *reinterpret_cast<const uint4*>(from[i]);
            from[i] += x_depth<BM>();
        }
    }
    // In the order of row_weights.
    LILY_INLINE void put(uint tile) const {
        UNROLL for (uint i = 0; i < COUNT; i++) {
            uint pair[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
            if (BITS == 4) {
                pair[0] = __byte_perm(v[i].x, v[i].z, 0x5410);
                pair[1] = __byte_perm(v[i].x, v[i].z, 0x7632);
                pair[2] = __byte_perm(v[i].y, v[i].w, 0x5410);
                pair[3] = __byte_perm(v[i].y, v[i].w, 0x7632);
            }
            UNROLL for (uint j = 0; j < 4; j++) store_word(tile + place[j] + i * (APART * TILE_K * 2), pair[j]);
        }
    }
};

// A matrix's weights on their way to memory, 64 columns a step; a warp asks for those of its own rows.
template <uint BITS, uint BN>
struct w_stream {
    static constexpr uint BLOCKS = BN / 64, PIECES = BITS / 2, ROWS = 2 * BLOCKS;  // 16-byte pieces of a row
    static constexpr uint COPY_ROWS = SIMD_WIDTH / PIECES, COPIES = MMA_ROWS / COPY_ROWS;
    static constexpr uint STEP = w_step_bytes(BITS, BN);
    const uint4* from[BLOCKS * COPIES];
    uint to, own;
    LILY_INLINE void begin(quant_matrix<BITS> m, uint k, uint columns, uint memory, uint tid) {
        const uint warp = tid / SIMD_WIDTH, lane = tid % SIMD_WIDTH;
        to = kept(memory + (warp * (BLOCKS * MMA_ROWS * PIECES) + lane) * 16);
        own = kept(memory + (warp * (BLOCKS * MMA_ROWS) + lane / 4) * PIECES * 16 + lane % 4 * (BITS * 2));
        UNROLL for (uint i = 0; i < BLOCKS * COPIES; i++) {
            const uint block = columns > 64 ? i / COPIES * 64 : 0;  // any rows, where there are none
            const uint row = block + warp * MMA_ROWS + i % COPIES * COPY_ROWS + lane / PIECES;
            from[i] = m.w + row * (k * BITS / 128) + lane % PIECES;
        }
    }
    LILY_INLINE void fetch(uint step, bool any) {
        UNROLL for (uint i = 0; i < BLOCKS * COPIES; i++) {
            if (any) copy_async_line(to + step % W_STEPS * STEP + i * (SIMD_WIDTH * 16), from[i]);
            from[i] += PIECES;
        }
    }
    // Two rows of each block of 64.
    LILY_INLINE void read(row_weights<BITS> (&v)[ROWS], uint step) const {
        UNROLL for (uint r = 0; r < ROWS; r++) v[r].load_staged(own + step % W_STEPS * STEP + r * (8 * PIECES * 16));
    }
};

// Scales and biases of a warp's rows, a row for each thread.
struct affine_stream {
    const bfloat* scales;
    const bfloat* biases;
    uint groups;
    uint2 s, b;  // of four groups
    uint to, own;
    template <uint BITS>
    LILY_INLINE void begin(quant_matrix<BITS> m, uint k, uint columns, uint memory, uint tid) {
        static_assert(TILE_N == 128);
        const uint warp = tid / SIMD_WIDTH, lane = tid % SIMD_WIDTH;
        const uint place = lane / MMA_ROWS * 64 + warp * MMA_ROWS + lane % MMA_ROWS;
        const uint row = place < columns ? place : 0;
        groups = k / QUANT_GROUP;
        scales = m.scales + row * groups;
        biases = m.biases + row * groups;
        to = kept(memory + tid * 8);
        own = kept(memory + (warp * SIMD_WIDTH + lane / 4) * 8);
    }
    LILY_INLINE static uint2 four(const bfloat* p, uint first, uint groups) {
        if (groups % AFFINE_GROUPS == 0) return *reinterpret_cast<const uint2*>(p + first);
        uint v[4];
        UNROLL for (uint i = 0; i < 4; i++) v[i] = p[min(first + i, groups - 1)].bits;
        return uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
    }
    LILY_INLINE void load(uint group) {
        s = four(scales, group, groups);
        b = four(biases, group, groups);
    }
    LILY_INLINE void put() const {
        UNROLL for (uint i = 0; i < AFFINE_GROUPS; i++) {
            const float scale = as_type<float>(s[i / 2] >> i % 2 * 16 << 16);
            const float bias = as_type<float>(b[i / 2] >> i % 2 * 16 << 16);
            store_words(to + i * (TILE_N * 8), uint2(pack2(scale, scale), pack2(bias, bias)));
        }
    }
    // Of a thread's row r: {scale, scale} and {bias, bias}.
    LILY_INLINE uint2 read(uint step, uint r) const {
        return load_words(own + step % AFFINE_GROUPS * (TILE_N * 8) + r * 64);
    }
};

// acc += x w^T over one step, whose x lies in `tile`. With wgmma the last product may still be at work when this
// returns, and reads registers until it ends: a step that has but one (ALONE) waits, as the next would overwrite them.
template <bool ALONE, uint BITS, uint BM, uint BN, uint SIMDS>
LILY_INLINE void multiply_step(tile_acc<BM, BN, SIMDS>& acc, const row_weights<BITS>* w, uint tile,
                               const affine_stream& affine, uint step) {
    UNROLL for (uint f = 0; f < acc.BLOCKS; f++) {
        const uint2 own[2] = {affine.read(step, 2 * f), affine.read(step, 2 * f + 1)};
        // Of product s, pair i / 2 of row i % 2.
        const auto weights = [&](uint s, uint i) {
            return half2_fma(w[2 * f + i % 2].pair(s, i / 2), own[i % 2].x, own[i % 2].y);
        };
        float* sums = acc.v + f * acc.BLOCK_VALUES;
#if LILY_WARPGROUP
        uint a[4][4];
        UNROLL for (uint s = 0; s < 4; s++)
            UNROLL for (uint i = 0; i < 4; i++) a[s][i] = weights(s, i);
        settle(a);
        settle<tile_acc<BM, BN, SIMDS>::BLOCK_VALUES>(sums);
        warpgroup_begin();
        UNROLL for (uint s = 0; s < 4; s++) warpgroup_mma<BM>(sums, a[s], tile_descriptor(tile) + 2 * s);
        warpgroup_end();
        warpgroup_wait<ALONE ? 0 : 1>();
#else
        UNROLL for (uint s = 0; s < 4; s++) {
            const uint a[4] = {weights(s, 0), weights(s, 1), weights(s, 2), weights(s, 3)};
            warp_mma<BM>(sums, a, tile, 2 * s);
        }
#endif
    }
}

// One matrix of a product.
template <uint BITS, uint BM, uint BN, uint SIMDS>
struct w_operand {
    w_stream<BITS, BN> weights;
    affine_stream affine;
    LILY_INLINE void begin(quant_matrix<BITS> w, uint k, uint columns, uint memory, uint ws, uint tid) {
        weights.begin(w, k, columns, memory, tid);
        affine.begin(w, k, columns, ws, tid);
        affine.load(0);
    }
    // Before the warp meets, having read what was there.
    LILY_INLINE void turn(uint step, uint k) {
        affine.put();
        if ((step + AFFINE_GROUPS) * TILE_K < k) affine.load(step + AFFINE_GROUPS);
    }
    template <bool ALONE>
    LILY_INLINE void multiply(tile_acc<BM, BN, SIMDS>& acc, uint tile, uint step) const {
        row_weights<BITS> v[w_stream<BITS, BN>::ROWS];
        weights.read(v, step);
        multiply_step<ALONE, BITS, BM, BN, SIMDS>(acc, v, tile, affine, step);
    }
};

// Takes operands through all of k: multiply(tile, step) for each step, whose x lies in `tile`.
template <uint BITS, uint BM, uint BN, uint SIMDS, uint COUNT, class Rows, class Multiply>
LILY_INLINE void quant_steps(w_operand<BITS, BM, BN, SIMDS> (&operand)[COUNT], const act_t* x, Rows rows, uint k,
                             uint live, act_t* xs, uint tid, Multiply multiply) {
    static_assert(2 * (tile_x_room<BM>() + tile_w_room()) + COUNT * W_STEPS * w_step_bytes(BITS, BN) <= MOST_MEMORY);
    x_stream<BITS, BM, SIMDS * SIMD_WIDTH> x_next;
    x_next.begin(x, rows, k, live, tid);
    x_next.load(k, tid);
    const auto fetch = [&](uint step) {
        UNROLL for (uint i = 0; i < COUNT; i++) operand[i].weights.fetch(step, step * TILE_K < k);
        copy_async_end();
    };
    UNROLL for (uint step = 0; step < W_STEPS - 1; step++) fetch(step);
    const uint tiles = kept(shared_address(xs));
    uint step = 0, turn = 0;
    for (uint left = k; left > 0; left -= min(left, x_depth<BM>())) {
        uint tile = tiles + turn * (BM * x_depth<BM>() * 2);
        turn = turn + 1 < X_TILES ? turn + 1 : 0;
        x_next.put(tile);
        publish_tile();
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (left > x_depth<BM>()) x_next.load(left - x_depth<BM>(), tid);
        for (const uint last = step + min(x_depth<BM>(), left) / TILE_K; step < last; step++) {
            copy_async_wait<W_STEPS - 2>();
            __syncwarp();
            if (step % AFFINE_GROUPS == 0) {
                UNROLL for (uint i = 0; i < COUNT; i++) operand[i].turn(step, k);
                __syncwarp();
            }
            fetch(step + W_STEPS - 1);
            multiply(tile, step);
            tile += BM * TILE_K * 2;
        }
    }
}

template <uint BITS, uint BM, uint BN, uint SIMDS, class Rows>
LILY_INLINE void quant_multiply(tile_acc<BM, BN, SIMDS>& acc, const act_t* x, Rows rows, quant_matrix<BITS> w,
                                uint k, uint live, uint columns, act_t* xs, act_t* ws, uint tid) {
    w_operand<BITS, BM, BN, SIMDS> operand[1];
    operand[0].begin(w, k, columns, shared_address(launch_memory()), shared_address(ws), tid);
    acc.columns = columns;
    quant_steps(operand, x, rows, k, live, xs, tid,
                [&](uint tile, uint step) { operand[0].template multiply<BN == 64>(acc, tile, step); });
    warpgroup_finish(acc.v);
}
template <uint BITS, uint BM, uint BN, uint SIMDS, class Rows>
LILY_INLINE void quant_multiply_pair(tile_acc<BM, BN, SIMDS>& first, tile_acc<BM, BN, SIMDS>& second,
                                     const act_t* x, Rows rows, quant_matrix<BITS> w1, quant_matrix<BITS> w2, uint k,
                                     uint live, uint columns, act_t* xs, act_t* ws, uint tid) {
    w_operand<BITS, BM, BN, SIMDS> operand[2];
    const uint memory = shared_address(launch_memory());
    operand[0].begin(w1, k, columns, memory, shared_address(ws), tid);
    operand[1].begin(w2, k, columns, memory + W_STEPS * w_stream<BITS, BN>::STEP,
                     shared_address(ws + tile_w_room() / 2), tid);
    first.columns = second.columns = columns;
    quant_steps(operand, x, rows, k, live, xs, tid, [&](uint tile, uint step) {
        operand[0].template multiply<false>(first, tile, step);
        operand[1].template multiply<false>(second, tile, step);
    });
    warpgroup_finish(first.v);
    warpgroup_finish(second.v);
}
