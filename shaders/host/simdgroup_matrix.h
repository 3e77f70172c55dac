// simdgroup_matrix of Metal, for width 32: 8 x 8 elements, spread over the lanes of a simdgroup as Apple's GPUs do it;
// half or bfloat, multiplied and added in fp32.
#pragma once

using ulong2 = vec<ulong, 2>;

// A lane holds the elements (row, column) and (row, column + 1). A quad of lanes holds two rows of four columns; the
// quads go down four rows, then to the other four columns, then to the lower half.
constexpr uint matrix_row(uint lane) {
    return (lane >> 4 & 1) << 2 | (lane >> 2 & 1) << 1 | (lane >> 1 & 1);
}
constexpr uint matrix_column(uint lane) {
    return (lane >> 3 & 1) << 2 | (lane & 1) << 1;
}

template <class T, int COLUMNS, int ROWS>
class simdgroup_matrix {
    static_assert(COLUMNS == 8 && ROWS == 8);

public:
    vec<T, 2>& thread_elements() { return elements_; }

private:
    vec<T, 2> elements_;
};

// Loading and multiplying are for whole simdgroups; only the latter notices who is missing. The origin is always 0.
template <class T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const T* from, ulong elements_per_row, ulong2,
                           bool transpose) {
    const uint lane = lily_fibers::current_thread() % SIMD_WIDTH, row = matrix_row(lane), column = matrix_column(lane);
    for (uint i = 0; i < 2; ++i)
        matrix.thread_elements()[i] =
            transpose ? from[(column + i) * elements_per_row + row] : from[row * elements_per_row + column + i];
}

// One lane's part of three matrices.
struct matrix_parts {
    float left[2], right[2], sum[2];
};

// Each element is one chain of fused or, without the instruction, separately rounded steps in ascending k.
inline void multiply_matrices(void* const* lanes, uint32_t) {
    float left[8][8], right[8][8], sum[8][8];
    for (uint lane = 0; lane < 32; ++lane) {
        const auto& parts = *static_cast<const matrix_parts*>(lanes[lane]);
        for (uint i = 0; i < 2; ++i) {
            const uint row = matrix_row(lane), column = matrix_column(lane) + i;
            left[row][column] = parts.left[i];
            right[row][column] = parts.right[i];
            sum[row][column] = parts.sum[i];
        }
    }
    for (uint row = 0; row < 8; ++row)
        for (uint k = 0; k < 8; ++k)
            for (uint column = 0; column < 8; ++column)
                sum[row][column] = fma(left[row][k], right[k][column], sum[row][column]);
    for (uint lane = 0; lane < 32; ++lane)
        for (uint i = 0; i < 2; ++i)
            static_cast<matrix_parts*>(lanes[lane])->sum[i] = sum[matrix_row(lane)][matrix_column(lane) + i];
}

// result = left right + sum
template <class T>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& result, simdgroup_matrix<T, 8, 8>& left,
                                          simdgroup_matrix<T, 8, 8>& right, simdgroup_matrix<float, 8, 8>& sum) {
    matrix_parts parts;
    for (uint i = 0; i < 2; ++i) {
        parts.left[i] = widen(left.thread_elements()[i]);
        parts.right[i] = widen(right.thread_elements()[i]);
        parts.sum[i] = sum.thread_elements()[i];
    }
    lily_fibers::simd_exchange(&multiply_matrices, 0, &parts);
    for (uint i = 0; i < 2; ++i) result.thread_elements()[i] = parts.sum[i];
}
