// The tensor operation matmul2d of macOS 26: products of tiles in threadgroup or device memory. Which sizes of tiles an
// operation takes is not known here.
#pragma once
#if __METAL_VERSION__ >= 400

namespace metal_check {

// Products that the operation offers and that sum in float.
template <class Left, class Right, class Result>
struct product_type {
    static constexpr constant bool exists = false;
};
#define METAL_CHECK_PRODUCT(LEFT, RIGHT, RESULT)      \
    template <>                                       \
    struct product_type<LEFT, RIGHT, RESULT> {        \
        static constexpr constant bool exists = true; \
    };
METAL_CHECK_PRODUCT(half, half, float)
METAL_CHECK_PRODUCT(bfloat, bfloat, float)
METAL_CHECK_PRODUCT(float, float, float)
#undef METAL_CHECK_PRODUCT

template <ulong DESCRIPTOR, class Scope, class Left, class Right>
struct matmul2d_layout {
    static_assert(product_type<typename Left::value_type, typename Right::value_type, float>::exists,
                  "operands of a product have one type, and no const");
    typedef matmul2d_layout type;
};

}  // namespace metal_check

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
    enum class mode { multiply, multiply_accumulate };
    int m, n, k;
    bool transpose_left, transpose_right, relaxed_precision;
    mode operation;
    constexpr matmul2d_descriptor(int m_, int n_, int k_, bool left = false, bool right = false, bool relaxed = false,
                                  mode operation_ = mode::multiply)
        : m(m_),
          n(n_),
          k(k_),
          transpose_left(left),
          transpose_right(right),
          relaxed_precision(relaxed),
          operation(operation_) {}
    // C++17 has no template parameters of class type, so the description becomes a number.
#define METAL_CHECK_NUMBER(SPACE)                                                                                \
    constexpr operator ulong() const SPACE {                                                                     \
        return ulong(m) << 48 | ulong(n) << 32 | ulong(k) << 16 | ulong(transpose_left) << 3 |                   \
               ulong(transpose_right) << 2 | ulong(relaxed_precision) << 1 | ulong(operation == mode::multiply); \
    }
    METAL_CHECK_NUMBER(thread)
    METAL_CHECK_NUMBER(constant)
#undef METAL_CHECK_NUMBER
};

template <ulong DESCRIPTOR, class Scope>
struct matmul2d;

template <ulong DESCRIPTOR, size_t SIMDS>
struct matmul2d<DESCRIPTOR, metal::execution_simdgroups<SIMDS>> {
    template <class Left, class Right>
    using layout =
        typename metal_check::matmul2d_layout<DESCRIPTOR, metal::execution_simdgroups<SIMDS>, Left, Right>::type;

    // The coordinates' type has a default since macOS 26.2 only.
    template <class Left, class Right, class Element, class Coordinate>
    using cooperative_tensor_destination_t =
        metal::cooperative_tensor<Element, metal::dextents<Coordinate, 2>, layout<Left, Right>>;

    template <class Left, class Right, class Element, class Coordinate = int>
    cooperative_tensor_destination_t<Left, Right, Element, Coordinate> get_destination_cooperative_tensor() const;

    // The operands are variables, and the result is one that this very operation made room for.
    template <class Left, class Right, class Extents>
    void run(thread Left& left, thread Right& right,
             thread metal::cooperative_tensor<float, Extents, layout<Left, Right>>& result) const;
};

}  // namespace tensor_ops
}  // namespace mpp

#endif
