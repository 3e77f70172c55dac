// What the CPU's stand-in for the shading language promises, at the SIMD width it is compiled for. Prints each breach;
// the exit status is their number.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "fibers.h"

static int breaches = 0;
static void expect(bool ok, const char* what) {
    if (!ok) {
        std::printf("breach: %s\n", what);
        ++breaches;
    }
}

// Distance of a float from the true value, in units of the last place of the true value's float.
static double ulps(float got, double want) {
    const float nearest = static_cast<float>(want);
    if (std::isinf(nearest)) return got == nearest ? 0 : 1e9;
    const double unit = std::max(std::ldexp(1.0, std::ilogb(nearest == 0 ? 1e-45f : nearest) - 23), 0x1p-149);
    return std::abs(double(got) - want) / unit;
}

namespace {
namespace lily_shader {

#include "tile.h"

void check_math() {
    double exp_error = 0, log_error = 0, sin_error = 0, rsqrt_error = 0;
    for (uint32_t bits = 0; bits < 0x7f800000u; bits += 9973) {
        const float x = std::bit_cast<float>(bits);
        exp_error = std::fmax(exp_error, ulps(precise::exp(-x), std::exp(-double(x))));
        if (x < 88) exp_error = std::fmax(exp_error, ulps(precise::exp(x), std::exp(double(x))));
        if (x > 0) log_error = std::fmax(log_error, ulps(precise::log(x), std::log(double(x))));
        if (x > 1e-38f) rsqrt_error = std::fmax(rsqrt_error, ulps(precise::rsqrt(x), 1 / std::sqrt(double(x))));
        if (x < 1e6f) {
            sin_error = std::fmax(sin_error, std::abs(double(precise::sin(x)) - std::sin(double(x))));
            sin_error = std::fmax(sin_error, std::abs(double(precise::cos(x)) - std::cos(double(x))));
        }
    }
    expect(exp_error <= 2 && log_error <= 2 && rsqrt_error <= 2, "exp, log and rsqrt are right to 2 units");
    expect(sin_error <= 0x1p-23, "sin and cos are right to 2^-23");
    expect(precise::exp(-INFINITY) == 0, "exp(-inf) is 0");
}

void check_conversions() {
    bool same = true;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const float wide = float(std::bit_cast<half>(static_cast<uint16_t>(bits)));
        if (wide == wide) same = same && std::bit_cast<uint16_t>(half(wide)) == bits;
        const bfloat b = std::bit_cast<bfloat>(static_cast<uint16_t>(bits));
        if (float(b) == float(b)) same = same && bfloat(float(b)).bits == bits;
    }
    expect(same, "half and bfloat survive a round trip through float");
    expect(float(bfloat(1.00390625f)) == 1.0f && float(bfloat(1.01171875f)) == 1.015625f, "bfloat rounds ties to even");
    expect(float(narrowed<half>(1e9f)) == 65504.0f && float(narrowed<half>(-1e9f)) == -65504.0f, "half saturates");
    expect(float(narrowed<bfloat>(1e30f)) == float(bfloat(1e30f)), "bfloat has the range of float");
    const float none = __builtin_nanf("");
    expect(std::isnan(float(narrowed<half>(none))) && std::isnan(float(narrowed<bfloat>(none))), "NaN stays NaN");
}

#if LILY_WIDTH == 1
void check_vectors() {
    bool halves = true, bfloats = true, acts = true;
    for (uint64_t bits = 0; bits < 0x100000000u; bits += 7919) {
        const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
        const ushort act = std::bit_cast<ushort>(to_act(x)), low = ushort(bits);
        halves =
            halves && (std::isnan(x) || narrow_half8(clamp_half8(splat8(x)))[0] == as_type<ushort>(narrowed<half>(x)));
        bfloats = bfloats && narrow_bfloat8(splat8(x))[0] == bfloat(x).bits;
        const f8 wide = widen_bfloat8(h8{low});
        bfloats = bfloats && as_type<uint>(float(wide[0])) == uint(low) << 16;
        acts = acts && (std::isnan(x) || narrow_act8(splat8(x))[0] == act);
    }
    expect(halves && bfloats && acts, "vectors of eight convert as single values do");
}
#endif

#if LILY_WIDTH == 32
constexpr uint SIMDS = 4, THREADS = SIMDS * 32;

void check_operations() {
    uint sum[THREADS], most[THREADS], before[THREADS], other[THREADS];
    float half_sum[THREADS];
    const char* error = run_group(SIMDS, [&](uint tid, uint lane, uint) {
        sum[tid] = simd_sum(tid);
        most[tid] = simd_max(lane * 7 % 32);
        before[tid] = simd_prefix_exclusive_sum(lane + 1);
        other[tid] = simd_shuffle_xor(lane, 5);
        half_sum[tid] = simd_sum(0.5f);
    });
    expect(error == nullptr, "a correct group runs");
    bool right = true;
    for (uint t = 0; t < THREADS; ++t) {
        const uint lane = t % 32, first = t - lane;
        right = right && sum[t] == 32 * first + 496 && most[t] == 31 && before[t] == lane * (lane + 1) / 2;
        right = right && other[t] == (lane ^ 5) && half_sum[t] == 16.0f;
    }
    expect(right, "every lane gets the result of simd_sum, simd_max, prefix sum and shuffle");
}

void check_shared() {
    uint got[THREADS];
    const char* error = run_group(SIMDS, [&](uint tid, uint, uint) {
        SHARED uint first[THREADS];
        SHARED uint second[THREADS];
        first[tid] = tid;
        second[tid] = 1000 + tid;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        got[tid] = first[THREADS - 1 - tid] + second[(tid + 40) % THREADS];
    });
    bool right = error == nullptr;
    for (uint t = 0; t < THREADS; ++t) right = right && got[t] == THREADS - 1 - t + 1000 + (t + 40) % THREADS;
    expect(right, "two threadgroup arrays are shared by all threads, and barriers order them");
}

template <class F>
void expect_divergence(const char* what, F body) {
    const char* error = run_group(SIMDS, body);
    expect(error != nullptr && std::string(error).find("divergent") != std::string::npos, what);
    check_operations();  // the next group is not affected
}

#if !defined(LILY_TENSOR_OPS)
// Every thread puts its elements where tile.h expects them.
void check_tiles() {
    constexpr uint BM = 16, BN = 64;
    const auto left = [](uint row, uint k) { return float(int(row * 7 + k * 3) % 17 - 8) / 4; };
    const auto right = [](uint column, uint k) { return float(int(column * 5 + k * 11) % 13 - 6) / 8; };
    float got[2][BM][BN] = {};
    uint written[2][BM][BN] = {};
    const char* error = run_group(SIMDS, [&](uint tid, uint lane, uint simd) {
        SHARED act_t a[BM * TILE_K];
        SHARED act_t b[BN * TILE_K];
        SHARED act_t plain[TILE_K * BN];
        for (uint i = tid; i < TILE_K * 64; i += THREADS) {
            const uint k = i % 64, other = i / 64;
            if (other < BM) a[tile_at(other, k)] = to_act(left(other, k));
            b[tile_at(other, k)] = to_act(right(other, k));
            plain[tile_at(k, other)] = to_act(right(other, k));
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile_acc<BM, BN, SIMDS> turned;
        tile_acc<BM, BN, SIMDS, true> straight;
        tile_clear(turned, lane, simd);
        tile_clear(straight, lane, simd);
        tile_multiply<BM, BN, SIMDS>(turned, a, b, BM, BN);
        tile_multiply_plain<BM, BN, SIMDS>(straight, a, plain, BM);
        for (uint i = 0; i < tile_capacity(turned); ++i) {
            const uint row = tile_row(turned, i), column = tile_col(turned, i);
            got[0][row][column] = turned[i];
            got[1][row][column] = straight[i];
            ++written[0][row][column];
            ++written[1][tile_row(straight, i)][tile_col(straight, i)];
        }
    });
    bool right_sums = error == nullptr, once = true;
    for (uint row = 0; row < BM; ++row)
        for (uint column = 0; column < BN; ++column) {
            float sum = 0;
            for (uint k = 0; k < TILE_K; ++k) sum += left(row, k) * right(column, k);
            right_sums = right_sums && got[0][row][column] == sum && got[1][row][column] == sum;
            once = once && written[0][row][column] == 1 && written[1][row][column] == 1;
        }
    expect(right_sums, "tiles multiply, with the right one turned or not");
    expect(once, "every element of an accumulator belongs to one thread");
}
#endif

void check_divergence() {
    const auto barrier = [] { threadgroup_barrier(mem_flags::mem_threadgroup); };
    expect_divergence("a barrier that half of the lanes reach is reported", [&](uint tid, uint, uint) {
        if (tid % 2) barrier();
    });
    expect_divergence("a barrier that one simdgroup does not reach is reported", [&](uint, uint, uint simd) {
        if (simd != 2) barrier();
    });
    expect_divergence("a simd_sum that half of the lanes reach is reported", [&](uint, uint lane, uint) {
        if (lane < 16) simd_sum(1.0f);
    });
    expect_divergence("a simd_sum that meets a barrier is reported", [&](uint, uint lane, uint) {
        if (lane < 16)
            simd_sum(1.0f);
        else
            barrier();
    });
#if !defined(LILY_TENSOR_OPS)
    expect_divergence("a product of blocks that half of the lanes reach is reported", [&](uint, uint lane, uint) {
        simdgroup_matrix<float, 8, 8> sum;
        simdgroup_matrix<act_t, 8, 8> left, right;
        left.thread_elements()[0] = left.thread_elements()[1] = to_act(0);
        right = left;
        sum.thread_elements()[0] = sum.thread_elements()[1] = 0;
        if (lane < 16) simdgroup_multiply_accumulate(sum, left, right, sum);
    });
#endif
    uint done = 0;
    const char* error = run_group(SIMDS, [&](uint tid, uint, uint simd) {
        if (simd == 0) simd_sum(tid);  // uniform within its simdgroup
        barrier();
        if (tid == 0) ++done;
    });
    expect(error == nullptr && done == 1, "what differs between simdgroups only is not divergence");
}
#endif

}  // namespace lily_shader
}  // namespace

int main() {
    lily_shader::check_math();
    lily_shader::check_conversions();
#if LILY_WIDTH == 1
    lily_shader::check_vectors();
#endif
#if LILY_WIDTH == 32
    lily_shader::check_operations();
    lily_shader::check_shared();
    lily_shader::check_divergence();
#if !defined(LILY_TENSOR_OPS)
    lily_shader::check_tiles();
#endif
#endif
    return breaches;
}
