// Elementary functions of the CPU device: at most 2 ulp, and free of calls and branches so that loops over
// them vectorise. They give the same bits with and without FMA hardware, because the objects are built with
// -ffp-contract=off.
#pragma once

namespace precise {

// x = n ln2 + r, |r| <= ln2 / 2; 2^n is applied in two halves so that results below the normal range round
// once more, to 0 at last.
LILY_INLINE float exp(float x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float shifted = x * 1.44269504f + kRound;
    const float n = shifted - kRound;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.98756915e-4f;
    p = p * r + 1.39819995e-3f;
    p = p * r + 8.33345188e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666655e-1f;
    p = p * r + 5.00000012e-1f;
    p = (p * r * r + r) + 1.0f;
    const int exponent = int(__builtin_bit_cast(uint, shifted) - __builtin_bit_cast(uint, kRound));
    const int half_exponent = exponent >> 1;
    const float scale = __builtin_bit_cast(float, uint(half_exponent + 127) << 23);
    const float rest = __builtin_bit_cast(float, uint(exponent - half_exponent + 127) << 23);
    return p * scale * rest;
}

// x = 2^e m, m in [sqrt(1/2), sqrt(2)); a polynomial in m - 1.
LILY_INLINE float log(float x) {
    const bool tiny = x < 1.17549435e-38f;
    const uint bits = __builtin_bit_cast(uint, tiny ? x * 8388608.0f : x);
    const uint moved = bits - 0x3f3504f3u;  // bits of sqrt(1/2)
    const float e = float(int(moved) >> 23) - (tiny ? 23.0f : 0.0f);
    const float m = __builtin_bit_cast(float, (moved & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    const float square = m * m;
    const float tail = p * m * square + e * -2.12194440e-4f - 0.5f * square;
    float y = m + tail + e * 0.693359375f;
    y = x == 0.0f ? -__builtin_inff() : y;
    y = x > 3.40282347e+38f ? x : y;
    return x >= 0.0f ? y : __builtin_nanf("");
}

// Positions times frequencies reach 10^5 and more, so the reduction by pi / 2 and the polynomials are in
// double.
LILY_INLINE float sin_quadrant(float x, long shift) {
    constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
    const double shifted = double(x) * 0.63661977236758134308 + kRound;
    const double n = shifted - kRound;
    const double r = (double(x) - n * 1.57079632673412561417e+00) - n * 6.07710050650619224932e-11;
    const double z = r * r;
    double s = -2.50507602534068634195e-08;
    s = s * z + 2.75573137070700676789e-06;
    s = s * z - 1.98412698298579493134e-04;
    s = s * z + 8.33333333332248946124e-03;
    s = s * z - 1.66666666666666324348e-01;
    s = s * z * r + r;
    double c = 2.08757232129817482790e-09;
    c = c * z - 2.75573143513906633035e-07;
    c = c * z + 2.48015872894767294178e-05;
    c = c * z - 1.38888888888741095749e-03;
    c = c * z + 4.16666666666666019037e-02;
    c = c * z * z - 0.5 * z + 1.0;
    const long quadrant = __builtin_bit_cast(long, shifted) + shift;
    const double y = (quadrant & 1) ? c : s;
    return float((quadrant & 2) ? -y : y);
}
inline float sin(float x) {
    return sin_quadrant(x, 0);
}
inline float cos(float x) {
    return sin_quadrant(x, 1);
}

inline float rsqrt(float x) {
    return 1.0f / __builtin_sqrtf(x);
}

}  // namespace precise
