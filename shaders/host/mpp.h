// Tensors and the tensor operation matmul2d of Metal, for width 32: half or bfloat, multiplied and added in fp32. As in
// Metal, which thread holds which element of a cooperative tensor is not for the shader to know.
#pragma once

namespace metal {

template <class Index, int RANK>
struct dextents {
    static_assert(RANK == 2);
    Index extent[2];
    template <class A, class B>
    constexpr dextents(A first, B second) : extent{Index(first), Index(second)} {}
};

struct tensor_inline {};

// Extent 0 is the contiguous one.
template <class T, class Extents, class Kind>
struct tensor {
    static_assert(std::is_same_v<Kind, tensor_inline>);
    T* data;
    Extents extents;
    tensor(T* data_, Extents extents_) : data(data_), extents(extents_) {}
};

template <int COUNT>
struct execution_simdgroups {
    static constexpr uint threads = COUNT * SIMD_WIDTH;
};

}  // namespace metal

using namespace metal;

namespace mpp::tensor_ops {

struct matmul2d_descriptor {
    enum class mode { multiply, multiply_accumulate };
    int m, n, k;
    bool transpose_left, transpose_right, relaxed;
    mode operation;
    constexpr matmul2d_descriptor(int m_, int n_, int k_, bool left, bool right, bool relaxed_, mode operation_)
        : m(m_), n(n_), k(k_), transpose_left(left), transpose_right(right), relaxed(relaxed_), operation(operation_) {}
};

// Thread t holds the elements t, t + THREADS, ... of the row-major M x N matrix.
template <class T, uint M, uint N, uint THREADS>
class cooperative_tensor {
public:
    static constexpr uint16_t get_capacity() { return (M * N + THREADS - 1) / THREADS; }
    bool is_valid_element(uint i) const { return element(i) < M * N; }
    vec<int, 2> get_multidimensional_index(uint i) const { return {int(element(i) % N), int(element(i) / N)}; }
    T& operator[](uint i) { return values_[i]; }

private:
    uint element(uint i) const { return i * THREADS + thread_; }

    T values_[get_capacity()];
    uint thread_ = lily_fibers::current_thread() % THREADS;
};

template <matmul2d_descriptor SHAPE, class Scope>
struct matmul2d {
    static_assert(!SHAPE.transpose_left && SHAPE.operation == matmul2d_descriptor::mode::multiply_accumulate);

    template <class Left, class Right, class T, class Index>
    using cooperative_tensor_destination_t = cooperative_tensor<T, SHAPE.m, SHAPE.n, Scope::threads>;

    // Each element is one chain of fused or, without the instruction, separately rounded steps in ascending
    // k.
    template <class Left, class Right, class Result>
    void run(Left left, Right right, Result& result) const {
        const uint row_step = SHAPE.transpose_right ? 1 : uint(right.extents.extent[0]);
        const uint column_step = SHAPE.transpose_right ? uint(right.extents.extent[0]) : 1;
        for (uint i = 0; i < result.get_capacity(); ++i) {
            if (!result.is_valid_element(i)) continue;
            const vec<int, 2> at = result.get_multidimensional_index(i);
            const auto* a = left.data + uint(at.y) * uint(left.extents.extent[0]);
            const auto* b = right.data + uint(at.x) * column_step;
            float sum = result[i];
            for (uint k = 0; k < uint(SHAPE.k); ++k) sum = fma(widen(a[k]), widen(b[k * row_step]), sum);
            result[i] = sum;
        }
    }
};

}  // namespace mpp::tensor_ops
