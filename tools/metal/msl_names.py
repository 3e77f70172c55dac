"""Words of Metal: those that it keeps to itself, and the names of its standard library.

After the Metal Shading Language Specification. Shaders use the library unqualified, and so declare none of
its names.
"""

FORBIDDEN_WORDS = "asm catch delete dynamic_cast goto new register thread_local throw try typeid virtual"
FORBIDDEN = frozenset(FORBIDDEN_WORDS.split())
RESERVED_WORDS = "vertex fragment ray_data object_data threadgroup_imageblock"
RESERVED = frozenset(RESERVED_WORDS.split())
NAMES = """
    abs absdiff acos acosh addsat all any array array_ref asin asinh atan atan2 atanh atomic
    atomic_bool atomic_compare_exchange_weak_explicit atomic_exchange_explicit
    atomic_fetch_add_explicit atomic_fetch_and_explicit atomic_fetch_max_explicit
    atomic_fetch_min_explicit atomic_fetch_or_explicit atomic_fetch_sub_explicit
    atomic_fetch_xor_explicit atomic_float atomic_int atomic_load_explicit atomic_store_explicit
    atomic_thread_fence atomic_uint atomic_ulong bool_constant ceil clamp clz command_buffer
    conditional conditional_t cooperative_tensor copysign cos cosh cospi cross ctz decay determinant
    dextents distance distance_squared divide dot dynamic_extent enable_if enable_if_t
    execution_simdgroup execution_simdgroups execution_thread execution_threads exp exp10 exp2
    extents extract_bits fabs faceforward false_type fast fdim floor fma fmax fmax3 fmedian3 fmin
    fmin3 fmod fract frexp get_num_samples grid hadd ilogb imageblock insert_bits integral_constant
    interpolant intersector is_same is_same_v isfinite isinf isnan isnormal isordered isunordered
    ldexp length length_squared level lgamma log log10 log2 mad24 madhi madsat
    make_filled_simdgroup_matrix max max3 median3 mem_flags memory_order memory_order_relaxed mesh
    min min3 mix modf mul24 mulhi nan nextafter normalize numeric_limits pack_float_to_snorm4x8
    pack_float_to_unorm4x8 popcount pow powr precise quad_all quad_any quad_ballot quad_broadcast
    quad_sum ray rectangle reflect refract remove_cv remove_reference reverse_bits rhadd rint rotate
    round rsqrt sampler saturate select sign signbit simd_active_threads_mask simd_all simd_and
    simd_any simd_ballot simd_broadcast simd_broadcast_first simd_is_first simd_is_helper_thread
    simd_max simd_min simd_or simd_prefix_exclusive_product simd_prefix_exclusive_sum
    simd_prefix_inclusive_product simd_prefix_inclusive_sum simd_product simd_shuffle
    simd_shuffle_and_fill_down simd_shuffle_and_fill_up simd_shuffle_down simd_shuffle_rotate_down
    simd_shuffle_rotate_up simd_shuffle_up simd_shuffle_xor simd_sum simd_vote simd_xor
    simdgroup_barrier simdgroup_load simdgroup_matrix simdgroup_multiply
    simdgroup_multiply_accumulate simdgroup_store sin sincos sinh sinpi smoothstep sqrt step subsat
    swap tan tanh tanpi tensor tensor_handle tensor_inline tensor_offset texture thread_scope
    threadgroup_barrier transpose triangle true_type trunc uniform unpack_snorm4x8_to_float
    unpack_unorm4x8_to_float vec visible_function_table
"""
LIBRARY_NAMES = frozenset(NAMES.split())
